"""Engines with every cache type: in place, and every edit of a sequence moves all of its parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.engines import (
    Call,
    Engines,
    changed_rows,
    feed,
    same_bits,
    snapshot,
    text,
    watched,
)

from cachegraph.models.cache_types import CacheType
from cachegraph.models.errors import StateFileError
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2

# Rows of three and of five blocks of 32 values.
SIZES = {"head_dim": 96, "index_head_dim": 160}
TYPES = [
    (CacheType.F16, CacheType.F16),
    (CacheType.BF16, CacheType.BF16),
    (CacheType.Q8_0, CacheType.Q8_0),
    (CacheType.F16, CacheType.Q8_0),
]
STEPS = ({0: 30, 3: 2}, {1: 11}, {0: 1, 1: 1, 3: 1}, {0: 2, 1: 5, 2: 24, 3: 9}, {2: 1}, {3: 3})
SAME = 1e-5


def opened(engines: Engines, rows: CacheType, index: CacheType) -> Engine:
    return engines.get(sizes=SIZES, cache=rows, index_cache=index)


@pytest.fixture(params=TYPES, ids=lambda pair: "-".join(pair))
def engine(request: pytest.FixtureRequest, engines: Engines) -> Engine:
    return opened(engines, *request.param)


def test_caches_change_in_place_and_only_in_rows_of_the_plan(engine: Engine) -> None:
    specs = engine.manifest.contract.caches
    addresses = {s.name: engine._store.caches[s.name].array.ctypes.data for s in specs}
    taken, written = snapshot(engine), set()

    def check(call: Call) -> None:
        nonlocal taken
        now = snapshot(engine)
        for spec in specs:
            changed = changed_rows(spec, taken, now)
            assert changed <= set(call.written(spec).tolist()), spec.name
            if changed:
                written.add(spec.name)
        taken = now

    with watched(engine, after=check):
        for counts in STEPS:
            feed(engine, counts, texts={seq: seq + 20 for seq in counts})
    assert written == {spec.name for spec in specs}
    for spec in specs:
        buffer = engine._store.caches[spec.name]
        assert buffer.value.data_ptr() == addresses[spec.name] == buffer.array.ctypes.data
        assert buffer.array.nbytes == spec.num_bytes
    for call in engine._graph.calls.values():
        outputs = {value.data_ptr() for value in call.binding.get_outputs()}
        assert set(addresses.values()) < outputs


def test_a_rejected_text_leaves_no_trace(engine: Engine) -> None:
    feed(engine, {1: 24})
    feed(engine, {1: 7})
    wanted = feed(engine, {1: 5})[1]
    engine.clear()
    feed(engine, {1: 24})
    feed(engine, {1: 7})
    rejected = text(6, 0, 6, engine.manifest.vocab_size)
    engine.decode(Batch.of(rejected, np.arange(31, 37), [1] * 6, logits=True))
    engine.remove(1, 31)
    np.testing.assert_allclose(feed(engine, {1: 5})[1], wanted, rtol=0, atol=SAME)


def test_a_copy_goes_on_as_the_original_and_counts_its_bytes(engine: Engine) -> None:
    feed(engine, {0: 24})
    feed(engine, {0: 13})
    moves = engine._store.table.live_rows(0, 2)
    moved = engine.copy(0, 2)
    specs = engine.manifest.contract.caches
    rows = {move.kind: move.source.size for move in moves}
    assert moved == sum(rows[s.kind] * s.width * s.dtype.itemsize for s in specs)
    for move in moves:
        for spec in (s for s in specs if s.kind is move.kind):
            array = engine._store.caches[spec.name].array
            assert array[move.target].tobytes() == array[move.source].tobytes(), spec.name
    assert {move.kind for move in moves if move.source.size} == {s.kind for s in specs}
    wanted = feed(engine, {0: 9})[0]
    found = feed(engine, {2: 9}, texts={2: 0})[2]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=SAME)


def test_a_saved_sequence_goes_on_in_another_slot(engine: Engine, tmp_path: Path) -> None:
    feed(engine, {0: 24})
    feed(engine, {0: 13})
    engine.save(tmp_path / "state")
    wanted = feed(engine, {0: 9})[0]
    engine.clear(data=True)
    engine.restore(tmp_path / "state", {0: 3})
    found = feed(engine, {3: 9}, texts={3: 0})[3]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=SAME)


def test_a_state_of_another_type_is_refused(engines: Engines, tmp_path: Path) -> None:
    """The first difference is named; no row changes."""
    half = opened(engines, *TYPES[0])
    feed(half, {0: 10})
    half.save(tmp_path / "state")
    other = opened(engines, *TYPES[1])
    feed(other, {0: 3})
    before = snapshot(other)
    with pytest.raises(StateFileError, match=r"float16.*bfloat16"):
        other.restore(tmp_path / "state")
    assert same_bits(before, snapshot(other))


def test_erased_streams_are_zero_in_every_part(engine: Engine) -> None:
    feed(engine, {0: 20, 1: 20})
    engine.clear(1, data=True)
    for spec in engine.manifest.contract.caches:
        start = spec.layout.base(1)
        rows = engine._store.caches[spec.name].array[
            start : start + spec.layout.rows_per_stream
        ]
        assert not rows.any(), spec.name


def test_neighbours_padding_and_splits_change_no_more_than_a_rounded_row(
    engine: Engine,
) -> None:
    """Float noise may move a value over a rounding edge, so 1e-5 is owed for f32 rows only."""
    whole = feed(engine, {0: 24})[0]
    engine.clear()
    parts = [feed(engine, {0: n, 2: 3})[0] for n in (11, 1, 12)]
    assert np.abs(whole).max() > 1
    assert np.abs(np.concatenate(parts) - whole).max() < 0.05
