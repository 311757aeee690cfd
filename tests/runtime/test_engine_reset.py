"""What a sequence holds by position, and resets: one stream is zeroed, every other byte stays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from support.engines import cold, feed, same_bits, snapshot

from cachegraph.models.contract import CacheKind
from cachegraph.models.errors import RewindError, UsageError
from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2


def test_positions_are_those_held(engine: Engine) -> None:
    feed(engine, {0: 17, 2: 3})
    engine.remove(0, 12)
    engine.copy(0, 3)
    held = [engine.positions(seq) for seq in range(4)]
    assert held == [range(12), range(0), range(3), range(12)]


def hashes(engine: Engine, left_out: int) -> dict[str, str]:
    """A hash of each cache without one stream's block; of raw caches, of every byte."""
    found = {}
    for spec in engine.manifest.contract.caches:
        rows = engine._store.caches[spec.name].array
        if spec.kind is not CacheKind.RAW:
            base = spec.layout.base(left_out)
            own = np.arange(base, base + spec.layout.rows_per_stream)
            rows = np.delete(rows, own, axis=0)
        found[spec.name] = hashlib.sha256(rows.tobytes()).hexdigest()
    return found


def test_a_reset_zeroes_one_stream_and_no_other_byte(engine: Engine) -> None:
    feed(engine, {0: 60, 1: 61, 2: 59, 3: 48})
    before = hashes(engine, 1)
    engine.reset(1)
    assert hashes(engine, 1) == before
    for spec in engine.manifest.contract.caches:
        if spec.kind is not CacheKind.RAW:
            base = spec.layout.base(1)
            block = engine._store.caches[spec.name].array[base:][: spec.layout.rows_per_stream]
            assert not block.any(), spec.name
    assert [engine.length(seq) for seq in range(4)] == [60, 0, 59, 48]
    assert not engine._store.table.cells._members[1].any()
    again = feed(engine, {1: 30})[1]
    assert np.abs(again - cold(engine, 0, [30], source=1)).max() <= 1e-5


@pytest.mark.parametrize("seq", [-1, 4])
def test_an_id_past_the_last_stream_is_refused(engine: Engine, seq: int) -> None:
    feed(engine, {0: 14})
    before = snapshot(engine)
    with pytest.raises(UsageError, match=f"no sequence {seq}; this bundle holds 0 to 3"):
        engine.reset(seq)
    with pytest.raises(UsageError, match=f"no sequence {seq};"):
        engine.positions(seq)
    assert engine.length(0) == 14
    assert same_bits(before, snapshot(engine))


EDITS: dict[str, Callable[[Engine], object]] = {
    "reset": lambda e: e.reset(1),
    "cleared": lambda e: e.clear(-1),
    "cut": lambda e: e.remove(1, 9),
    "copied over": lambda e: e.copy(0, 1),
}


@pytest.mark.parametrize("how", EDITS)
def test_an_edit_voids_the_checkpoint_and_says_which(engine: Engine, how: str) -> None:
    feed(engine, {0: 5, 1: 10})
    engine.checkpoints.prepare("host", 4)
    engine.checkpoints.save()
    feed(engine, {1: 1})
    EDITS[how](engine)
    with pytest.raises(RewindError, match=f"void: the sequence was {how} since the save"):
        engine.checkpoints.accept(1, 0)
    engine.checkpoints.release()
