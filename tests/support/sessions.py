"""Sequences that are edited, saved and restored, beside cold runs of the same text.

`append` is the one place that says how tests add tokens to a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.bundles import largest_difference, open_engine

from cachegraph.models.contract import CacheKind, CacheSpec
from cachegraph.models.planner_specs import spec_of
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.engine import Engine

Rows = dict[str, NDArray[Any]]
Logits = NDArray[np.float32]
TOLERANCE = 1e-5


def append(engine: Engine, seq: int, tokens: Sequence[int]) -> Logits:
    """Add tokens to a sequence; logits after every one of them, [n, vocab]."""
    start, count = engine.length(seq), len(tokens)
    positions = range(start, start + count)
    return engine.decode(Batch.of(tokens, positions, [seq] * count, logits=[True] * count))


def needed_rows(engine: Engine, seq: int) -> Rows:
    """What a later step may read of a sequence: by cache name, ascending by position.

    Raw rows of the next token's window, finished compressed rows, state rows of open windows.
    """
    return {
        spec.name: engine._store.caches[spec.name].array[_needed(engine, spec, seq)].copy()
        for spec in engine.manifest.contract.caches
    }


def _needed(engine: Engine, spec: CacheSpec, seq: int) -> NDArray[np.int64]:
    planners, length = engine.manifest.planners, engine.length(seq)
    if spec.kind is CacheKind.RAW:
        raw, positions = planners.raw, np.arange(length)
        seen = (positions > length - raw.window) | (positions < raw.pinned)
        return engine._store.table.cells.rows_of(seq, positions[seen])
    if spec.kind in (CacheKind.CSA, CacheKind.LID, CacheKind.HCA):
        rows = np.arange(length // spec_of(planners.compressors, spec.kind).ratio)
    else:
        kind = CacheKind(spec.kind.value.removesuffix("_state"))
        compressor = spec_of(planners.compressors, kind)
        opened = length - length % compressor.ratio
        back = compressor.ratio if compressor.overlap else 0
        rows = np.arange(max(0, opened - back), length)
    return spec.layout.base(seq) + rows % spec.layout.rows_per_stream


def poison_unneeded(engine: Engine, value: float) -> None:
    """Overwrite every row, spare ones too, that no sequence needs; sentinels stay."""
    for spec in engine.manifest.contract.caches:
        rows = engine._store.caches[spec.name].array
        is_kept = np.zeros(len(rows), np.bool_)
        is_kept[spec.layout.live_rows : spec.layout.spare_start] = True
        for seq in range(engine.num_sequences):
            is_kept[_needed(engine, spec, seq)] = True
        rows[~is_kept] = value


class Oracle:
    """Cold runs in an engine of their own, each text once.

    A text is run alone from an empty sequence, as one batch.
    """

    def __init__(self, bundle: Path) -> None:
        self.engine = open_engine(bundle)
        self._runs: dict[tuple[int, ...], tuple[Logits, Rows]] = {}

    def forget(self) -> None:
        """Drop the runs that are kept."""
        self._runs.clear()

    def run(self, text: Sequence[int]) -> tuple[Logits, Rows]:
        """Logits of every position and the needed rows at the end."""
        key = tuple(text)
        if key not in self._runs:
            self.engine.clear()
            vocab = self.engine.manifest.vocab_size
            logits = append(self.engine, 0, key) if key else np.zeros((0, vocab), np.float32)
            self._runs[key] = logits, needed_rows(self.engine, 0)
        return self._runs[key]

    def check(self, engine: Engine, seq: int, more: Sequence[int] = ()) -> None:
        """A sequence is what a cold run of its tokens is, now and after more tokens."""
        _, rows = self.run(engine.tokens(seq))
        assert_close(needed_rows(engine, seq), rows)
        if more:
            held = engine.length(seq)
            logits = append(engine, seq, more)
            wanted, rows = self.run(engine.tokens(seq))
            assert np.abs(logits - wanted[held:]).max() <= TOLERANCE
            assert_close(needed_rows(engine, seq), rows)


def assert_close(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Rows of the same names and shapes, equal to float noise."""
    assert largest_difference(ours, theirs) <= TOLERANCE
