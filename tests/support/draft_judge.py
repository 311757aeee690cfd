"""Drafts of a tiny engine, judged by the float64 twins of both graphs.

A text whose narrowest cut is a cliff is drawn again here; nothing is excused when compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.bundles import Bundles
from support.drafts import CLIFF
from support.tiny import random_tensors, tiny_config

from cachegraph.models.deepseek_v4.twin import TwinRun, forward
from cachegraph.models.deepseek_v4.twin_draft import draft_greedy
from cachegraph.runtime.engine import Engine

SEED, NEAR, DRAFTS = 1, 1e-4, 3
CONFIG = tiny_config()
WEIGHTS = random_tensors(CONFIG, SEED, with_draft=True)
Logits = NDArray[np.float32]


class Judge:
    """The twins' drafts behind a text; texts of near ties are never asked about."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, ...], TwinRun] = {}

    def main(self, tokens: Sequence[int]) -> TwinRun:
        key = tuple(tokens)
        if key not in self._runs:
            self._runs[key] = forward(CONFIG, WEIGHTS, np.array(key))
        return self._runs[key]

    def drafts(
        self, tokens: Sequence[int], pending: int, count: int, known_from: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Greedy drafts and their logits, where streams are known from a position on."""
        streams = self.main(tokens).streams[known_from:]
        ids = [*tokens[known_from + 1 :], pending]
        return draft_greedy(CONFIG, WEIGHTS, streams, ids, count)

    def text(self, size: int) -> list[int]:
        """Tokens whose every cut is wide."""
        for seed in range(100):
            tokens = np.random.default_rng(seed).integers(CONFIG.vocab_size, size=size)
            if self.main(tokens.tolist()).smallest_gap >= CLIFF:
                return [int(token) for token in tokens]
        raise AssertionError("no text without a near tie")


def bundle_of(bundles: Bundles, *, with_draft: bool = True, **choices: Any) -> Path:
    """The mixed model with a draft block; `choices` as of `Bundles.bundle`."""
    return bundles.bundle(bundles.checkpoint(seed=SEED, with_draft=with_draft), **choices)


def load(folder: Path, *, draft: bool = True) -> Engine:
    """An engine that drafts, on one CPU thread."""
    return Engine.load(folder, device="cpu", threads=1, spinning=False, draft=draft)


def drafted(
    engine: Engine, pending: dict[int, int], count: int = DRAFTS
) -> tuple[dict[int, list[int]], dict[int, list[Logits]]]:
    """Greedy drafts of the engine, and the logits that they were chosen from."""
    seen: dict[int, list[Logits]] = {seq: [] for seq in pending}

    def choose(seq: int, row: Logits) -> int:
        seen[seq].append(row.copy())
        return int(row.argmax())

    return engine.draft(pending, count, choose), seen


def check(
    engine: Engine,
    judge: Judge,
    pending: int,
    seq: int = 0,
    *,
    count: int = DRAFTS,
    known_from: int = 0,
    near: float = NEAR,
) -> list[int]:
    """The drafts behind what a sequence holds are the twin's."""
    tokens, logits = judge.drafts(engine.tokens(seq), pending, count, known_from)
    found, seen = drafted(engine, {seq: pending}, count)
    assert np.abs(np.stack(seen[seq]) - logits).max() <= near
    assert found[seq] == tokens.tolist()
    return found[seq]
