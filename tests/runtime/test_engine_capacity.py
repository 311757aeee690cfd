"""Full caches: the last row of every kind, one token too many, and rows that must not leak."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.bundles import largest_difference, live_rows
from support.engines import Engines, changed_rows, cold, feed, same_bits, snapshot, watched
from support.fakes import FakeSession

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind
from cachegraph.models.errors import CapacityError
from cachegraph.runtime.binding import CpuBinder
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.opening import OpenGraph, OpenGraphs
from cachegraph.runtime.ort import load_onnxruntime

pytestmark = pytest.mark.r2
# The ratios are 4 and 12: contexts around the end of a block of both, and of one.
CONTEXTS = [23, 24, 25, 28]


def small(engines: Engines, context: int) -> Engine:
    return engines.get(capacity=Capacity(context=context, sequences=2, max_step=6))


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_context_can_be_filled_to_its_last_row(engines: Engines, context: int) -> None:
    """Of both sequences; the row before the spare rows belongs to the last one."""
    engine = small(engines, context)
    before = snapshot(engine)
    alone = [cold(engine, seq, [1] * context, source=context + seq) for seq in range(2)]
    engine.clear()
    texts = {seq: context + seq for seq in range(2)}
    parts = []
    for counts in ({0: context - 2, 1: context - 3}, {1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}):
        parts.append(feed(engine, counts, texts=texts))
    for seq in range(2):
        rows = np.concatenate([part[seq] for part in parts if seq in part])
        assert np.abs(rows - alone[seq]).max() <= 1e-5
    after = snapshot(engine)
    for spec in engine.manifest.contract.caches:
        layout = spec.layout
        changed = changed_rows(spec, before, after)
        if spec.kind in (CacheKind.CSA, CacheKind.LID, CacheKind.HCA):
            ratio = 12 if spec.kind is CacheKind.HCA else 4
            rows_of = {layout.base(s) + i for s in range(2) for i in range(context // ratio)}
        else:
            rows_of = set(range(layout.live_rows))
        live = {row for row in changed if row < layout.live_rows}
        assert live == rows_of, spec.name


@pytest.mark.parametrize("context", CONTEXTS)
def test_padding_hits_no_row_of_a_full_neighbour(engines: Engines, context: int) -> None:
    engine = small(engines, context)
    feed(engine, {1: context})
    held = live_rows(engine, 1)
    for count in (1, 2, 5, 6, 1):
        feed(engine, {0: count})
        assert same_bits(live_rows(engine, 1), held)
    engine.clear(1)
    for count in (context - 1, 1):
        feed(engine, {1: count})
    assert largest_difference(live_rows(engine, 1), held) <= 1e-5


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("held", [0, 1, -1, "full"])
def test_one_token_more_is_refused_and_changes_nothing(
    engines: Engines, context: int, held: Any
) -> None:
    engine = small(engines, context)
    start = {"full": context, -1: context - 1}.get(held, held)
    if start:
        feed(engine, {0: start})
    feed(engine, {1: 3})
    before = snapshot(engine)
    with watched(engine) as calls, pytest.raises(CapacityError, match="sequence 0 is full"):
        feed(engine, {0: context - start + 1, 1: 2})
    assert calls == []
    assert (engine.length(0), engine.length(1)) == (start, 3)
    assert same_bits(before, snapshot(engine))
    rest = {0: context - start, 1: 2} if start < context else {1: 2}
    assert all(np.isfinite(rows).all() for rows in feed(engine, rest).values())
    engine.clear(0)
    feed(engine, {0: 1})
    assert engine.length(0) == 1


def test_a_full_engine_goes_on_after_one_sequence_is_freed(engine: Engine) -> None:
    """A65: four full sequences; the error is of the one that asks, clearing it makes room."""
    context = engine.manifest.capacity.context
    feed(engine, dict.fromkeys(range(4), context))
    for seq in range(4):
        with pytest.raises(CapacityError, match=f"sequence {seq} is full"):
            engine.append([1], seq)
    engine.clear(2)
    again = feed(engine, {2: 9})[2]
    assert [engine.length(seq) for seq in range(4)] == [context, context, 9, context]
    assert np.abs(again - cold(engine, 2, [9])).max() <= 1e-5


def test_a_thousand_churn_cycles_leak_no_rows(engine: Engine) -> None:
    """A65: random prefills, decodes and clears on the host side of an engine."""
    ort = load_onnxruntime()
    graph = OpenGraph(
        session=FakeSession(),
        contract=engine.manifest.contract,
        device="cpu",
        binder=CpuBinder(ort),
    )
    host = Engine(engine.folder, engine.manifest, OpenGraphs(stages=(graph,)))
    cells, context = host._store.table.cells, engine.manifest.capacity.context
    rng = np.random.default_rng(7)
    for _ in range(1000):
        seq, count = int(rng.integers(4)), int(rng.integers(1, context + 1))
        room = context - host.length(seq)
        if count <= room:
            host.append([1] * count, seq)
        else:
            with pytest.raises(CapacityError):
                host.append([1] * count, seq)
            host.clear(seq)
        held = [host.length(s) for s in range(4)]
        assert cells._members.sum(axis=1).tolist() == [
            min(n, cells.layout.rows_per_stream) for n in held
        ]
    host.clear()
    assert not cells._members.any()
    assert (cells._positions == -1).all()
    for seq in range(4):
        host.append([1] * context, seq)
    assert len(host._graph.calls) <= 4 * len(list(host.manifest.ladder.sizes()))
    host.close()
