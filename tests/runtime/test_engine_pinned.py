"""Pinned rows: the first positions stay in the raw cache and every later token sees them.

That is not the published model, so that the twin is asked with the same number of pinned positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.bundles import largest_difference, live_rows, twin_rows, with_capacity
from support.engines import Engines, cold, feed, snapshot, text
from support.tiny import random_tensors, tiny_config

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind
from cachegraph.models.deepseek_v4.twin import TwinRun, forward
from cachegraph.models.errors import ConfigError, RewindError, StateFileError
from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2

PINNED = 3
MODELS = ("mixed", "hca_only", "csa_only", "window_only", "ratios")


def opened(engines: Engines, name: str = "mixed", pinned: int = PINNED) -> Engine:
    return engines.get(name, capacity=with_capacity(pinned=pinned, max_step=12, rewind=5))


@cache
def twin(name: str, tokens: Sequence[int], pinned: int) -> TwinRun:
    config = tiny_config(name)
    return forward(config, random_tensors(config, 1), tokens, pinned)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pinned", [1, PINNED, 20])
def test_logits_and_rows_are_the_twins(engines: Engines, name: str, pinned: int) -> None:
    """Also where more is pinned than a window holds, and while the pinned rows fill."""
    engine = opened(engines, name, pinned)
    for seq, length in ((0, 2), (1, 45), (2, 12), (3, 60)):
        logits = feed(engine, {seq: length})[seq]
        tokens = tuple(text(seq, 0, length, engine.manifest.vocab_size))
        run = twin(name, tokens, pinned)
        assert np.abs(logits - run.logits).max() <= 1e-4
        assert (
            largest_difference(live_rows(engine, seq), twin_rows(engine.manifest, run)) <= 1e-4
        )


def test_pinned_rows_change_what_is_behind_the_window_only(engines: Engines) -> None:
    engine = opened(engines)
    vocab = engine.manifest.vocab_size
    ours = feed(engine, {0: 40})[0]
    plain = twin("mixed", tuple(text(0, 0, 40, vocab)), 0).logits
    gaps = np.abs(ours - plain).max(axis=1)
    assert gaps[:7].max() <= 1e-4  # the window holds all positions
    assert gaps[7:].min() > 1e-3


@pytest.mark.parametrize("chunks", [[1] * 40, [12, 12, 12, 4], [2, 1, 9, 3, 25]])
def test_splits_and_neighbours_change_nothing(engines: Engines, chunks: list[int]) -> None:
    engine = opened(engines)
    wanted = cold(engine, 0, [40])
    assert np.abs(cold(engine, 2, chunks, source=0) - wanted).max() <= 1e-5
    engine.clear()
    feed(engine, {1: 31})
    rows = [feed(engine, {0: n, 1: 1, 3: n})[0] for n in chunks if n < 25]
    assert np.abs(np.concatenate(rows) - wanted[: sum(map(len, rows))]).max() <= 1e-5


@pytest.mark.parametrize("length", [2, 3, 4, 8, 29, 60])
def test_rewinds_of_the_whole_budget(engines: Engines, length: int) -> None:
    """Below, at and past the pinned rows; the rejected text has other tokens."""
    engine = opened(engines)
    wanted = cold(engine, 0, [length + 5])
    for taken in range(6):
        engine.clear(1)
        feed(engine, {1: length}, texts={1: 0})
        if taken:
            feed(engine, {1: taken}, texts={1: 9})
            engine.remove(1, length)
        rows = feed(engine, {1: 5}, texts={1: 0})[1]
        assert np.abs(rows - wanted[length:]).max() <= 1e-5


def test_pinned_rows_do_not_widen_the_reach(engines: Engines) -> None:
    """Where the rows between pinned ones and window are gone a sequence cannot stand."""
    engine = opened(engines)
    feed(engine, {0: 90})
    assert all(span.start == 0 or span.start > 60 for span in engine.reachable(0))
    with pytest.raises(RewindError, match="cannot be cut to 20"):
        engine.remove(0, 20)


def test_copies_and_state_files_carry_the_pinned_rows(
    engines: Engines, tmp_path: Path
) -> None:
    """Into a bundle with fewer raw rows, too: it keeps the pinned and the newest."""
    engine = opened(engines)
    wanted = cold(engine, 0, [60])[40:]
    engine.clear()
    feed(engine, {0: 40})
    engine.copy(0, 2)
    engine.save(tmp_path / "state", [0])
    engine.clear(0)
    engine.restore(tmp_path / "state", {0: 3})
    for seq in (2, 3):
        assert np.abs(feed(engine, {seq: 20}, texts={seq: 0})[seq] - wanted).max() <= 1e-5
    smaller = engines.get(capacity=Capacity(context=90, max_step=2, rewind=1, pinned=PINNED))
    smaller.restore(tmp_path / "state")
    rows = [feed(smaller, {0: 2})[0] for _ in range(10)]
    assert np.abs(np.concatenate(rows) - wanted).max() <= 1e-5


@pytest.mark.parametrize("mode", ["ring", "delta", "shadow", "host"])
@pytest.mark.parametrize("length", [1, 3, 30])
def test_checkpoints_of_every_mode(engines: Engines, mode: str, length: int) -> None:
    engine = opened(engines)
    wanted = cold(engine, 1, [length + 9])[length + 2 :]
    engine.clear()
    feed(engine, {1: length})
    engine.checkpoints.prepare(mode, 5)
    engine.checkpoints.save()
    feed(engine, {1: 2})
    feed(engine, {1: 3}, texts={1: 9})
    if engine.checkpoints.accept(1, 2).replay_from is not None:
        feed(engine, {1: 2})
    assert np.abs(feed(engine, {1: 7})[1] - wanted).max() <= 1e-5
    engine.checkpoints.release()


@pytest.mark.parametrize("pinned", [0, PINNED + 1])
def test_a_file_of_another_number_is_refused_by_name(
    engines: Engines, tmp_path: Path, pinned: int
) -> None:
    saver, engine = opened(engines, pinned=pinned), opened(engines)
    feed(saver, {0: 30})
    saver.save(tmp_path / "state")
    before = snapshot(engine)
    with pytest.raises(StateFileError, match=f"pinned is {pinned} there and {PINNED} here"):
        engine.restore(tmp_path / "state")
    after = snapshot(engine)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_the_rows_of_a_stream(engines: Engines) -> None:
    """Window 7, longest step 12, budget 5, and the pinned ones."""
    manifest = opened(engines).manifest
    assert manifest.layouts[CacheKind.RAW].rows_per_stream == PINNED + 7 + 12 + 5
    assert manifest.dimensions["W"] == f"raw rows read per stream: {PINNED + 7} + P"
    with pytest.raises(ConfigError, match="pinned is -1; it must be 0 to"):
        Capacity(pinned=-1)
