"""Texts for tiny models that no near tie can spoil, with what transformers says about them.

A text whose narrowest cut of a top-k is a cliff is drawn again here, when it is made; nothing is
excused when answers are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support.oracle import oracle_logits, published_weights

from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.parse import load_config
from cachegraph.models.deepseek_v4.twin import TwinRun, forward

CLIFF = 1e-5  # two f32 runs may choose differently where scores are nearer than this


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Tokens [T], logits of transformers [T, vocab] in f32, and the twin's run."""

    tokens: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    twin: TwinRun

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A checkpoint and texts of different lengths, the longest first."""

    folder: Path
    config: DeepseekV4Config
    texts: tuple[Text, ...]

    @property
    def context(self) -> int:
        """A capacity that the longest text does not fill."""
        return len(self.texts[0]) + 9


def lengths(config: DeepseekV4Config) -> tuple[int, ...]:
    """Past several blocks of each ratio and more blocks than top-k; none ends with a block."""
    longest = max(95, 2 * config.hca_ratio if config.hca_ratio > 50 else 0) + 4
    return longest, longest - 17, longest // 3 + 2, 9


def make_case(folder: Path) -> Case:
    """Texts for a checkpoint, redrawn until they have no cliff."""
    config, weights = load_config(folder), published_weights(folder)
    texts = [
        _text(folder, config, weights, size, seed) for seed, size in enumerate(lengths(config))
    ]
    return Case(folder=folder, config=config, texts=tuple(texts))


def _text(
    folder: Path, config: DeepseekV4Config, weights: dict[str, Any], size: int, first_seed: int
) -> Text:
    for seed in range(first_seed, first_seed + 4000, 100):
        tokens = np.random.default_rng(seed).integers(config.vocab_size, size=size)
        run = forward(config, weights, tokens)
        if run.smallest_gap >= CLIFF:
            logits = oracle_logits(folder, tokens.tolist())
            return Text(tokens=tokens, logits=logits, twin=run)
    raise AssertionError(f"no seed gives {folder.name} a text of {size} without a near tie")
