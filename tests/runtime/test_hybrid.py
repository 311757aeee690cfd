"""Hybrid memory: what each step pools, what edits leave stale, and steps and edits that fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.bundles import Bundles, open_engine

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import RowSharing
from cachegraph.models.errors import BatchError, RewindError, StepError, UsageError
from cachegraph.runtime import Batch, Engine
from cachegraph.runtime.hybrid import HybridMemory
from cachegraph.runtime.planners.step import StepPlan

pytestmark = pytest.mark.r2

POOL, REWIND, LONG = 4, 4, 2000
TEXT = np.random.default_rng(5).integers(6, 90, size=LONG + 60).tolist()
OTHER = np.random.default_rng(6).integers(6, 90, size=60).tolist()


@pytest.fixture(scope="module")
def opened(bundles: Bundles) -> Iterator[dict[RowSharing, Engine]]:
    checkpoint = bundles.qwen_checkpoint("plain", index_heads=16)
    capacity = Capacity(context=LONG + 100, sequences=4, max_step=64, rewind=REWIND)
    engines = {
        sharing: open_engine(bundles.bundle(checkpoint, capacity=capacity, raw=sharing))
        for sharing in RowSharing
    }
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(params=RowSharing)
def engine(request: pytest.FixtureRequest, opened: dict[RowSharing, Engine]) -> Engine:
    """Four sequences, all of them forgotten and their marks cleared by a step."""
    made = opened[request.param]
    made.clear()
    made.append(OTHER[:1], 3)
    made.clear(3)
    made.append(OTHER[:1], 3)
    return made


def memory(engine: Engine) -> HybridMemory:
    found = engine._store.table
    assert isinstance(found, HybridMemory)
    return found


def watch(engine: Engine, patch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that are committed from now on."""
    plans: list[StepPlan] = []
    commit = memory(engine).commit
    patch.setattr(memory(engine), "commit", lambda plan: (plans.append(plan), commit(plan))[1])
    return plans


def made(plan: StepPlan) -> int:
    """Pools that a step makes."""
    assert plan.pooled is not None
    return int(plan.pooled.new_pools.size)


def feed(
    engine: Engine, seq: int, text: list[int], start: int, end: int
) -> NDArray[np.float32]:
    batch = Batch.of(text[start:end], range(start, end), [seq] * (end - start), logits=True)
    return engine.decode(batch)


@pytest.mark.parametrize("length", [7, LONG])
def test_a_step_makes_the_pools_that_it_completes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """However long the sequence is; others are left alone."""
    feed(engine, 1, OTHER, 0, 30)
    feed(engine, 0, TEXT, 0, length)
    plans = watch(engine, monkeypatch)
    for place in range(length, length + 9):
        feed(engine, 0, TEXT, place, place + 1)
    wanted = [int((place + 1) % POOL == 0) for place in range(length, length + 9)]
    assert [made(plan) for plan in plans] == wanted


def test_stale_pools_are_made_by_the_next_step_of_any_sequence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored sequence is not in the step; the marks go once it has succeeded."""
    feed(engine, 0, TEXT, 0, 18)
    data = engine.state(0)
    engine.set_state(1, data)
    plans = watch(engine, monkeypatch)
    feed(engine, 3, OTHER, 1, 2)
    feed(engine, 3, OTHER, 2, 3)
    assert [made(plan) for plan in plans] == [18 // POOL, 0]
    wanted = feed(engine, 0, TEXT, 18, 30)
    np.testing.assert_allclose(feed(engine, 1, TEXT, 18, 30), wanted, rtol=0, atol=1e-5)


def test_a_step_that_fails_leaves_the_marks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops its own sequences; the pools of others are made by the next that succeeds."""
    feed(engine, 0, TEXT, 0, 18)
    feed(engine, 2, OTHER, 0, 9)
    engine.set_state(1, engine.state(0))
    with monkeypatch.context() as broken:
        broken.setattr(engine._graph, "run", lambda call: 1 / 0)
        with pytest.raises(StepError, match=r"sequences \[2\] were dropped"):
            feed(engine, 2, OTHER, 9, 12)
    assert [engine.length(seq) for seq in range(4)] == [18, 18, 0, 1]
    plans = watch(engine, monkeypatch)
    feed(engine, 2, OTHER, 0, 2)
    assert made(plans[0]) == 18 // POOL
    wanted = feed(engine, 0, TEXT, 18, 22)
    np.testing.assert_allclose(feed(engine, 1, TEXT, 18, 22), wanted, rtol=0, atol=1e-5)


def test_a_cut_makes_no_pool_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before the cut keep their keys, the one that was cut open is made when it closes."""
    feed(engine, 0, TEXT, 0, 21)
    engine.rewind(0, 19)
    plans = watch(engine, monkeypatch)
    feed(engine, 0, OTHER, 19, 20)
    assert made(plans[0]) == 1


def test_a_copy_of_shared_rows_moves_states_alone(opened: dict[RowSharing, Engine]) -> None:
    moved = {}
    for sharing, engine in opened.items():
        engine.clear()
        feed(engine, 0, TEXT, 0, 40)
        moved[sharing] = engine.copy(0, 1)
    specs = opened[RowSharing.UNIFIED].manifest.contract.caches
    states = sum(spec.width * 4 for spec in specs if spec.kind.is_recurrent)
    assert moved[RowSharing.UNIFIED] == (REWIND + 1) * states
    rows = sum(
        spec.width * 4 for spec in specs if spec.kind.value in ("keys", "values", "index")
    )
    assert moved[RowSharing.PER_STREAM] == (REWIND + 1) * states + 40 * rows


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda e: e.rewind(0, 11), RewindError),
        (lambda e: e.rewind(0, 21), RewindError),
        (lambda e: e.remove(0, 3, 9), RewindError),
        (lambda e: e.remove(0, 5), RewindError),
        (lambda e: e.remove(-1, 11), RewindError),
        (lambda e: e.decode(Batch.of([1], [[18, 0, 0]], [0])), BatchError),
        (lambda e: e.decode(Batch.of([1, 2], [20, 19], [0, 0])), BatchError),
        (lambda e: e.decode(Batch.of([1], [[20, -1, 0]], [0])), BatchError),
        (lambda e: e.shift(0, 0, 5, 16), UsageError),
        (lambda e: e.shift(0, 3, -1, -4), UsageError),
        (lambda e: e.shift(0, 0, -1, -1), UsageError),
        (lambda e: e.divide(0, 10, -1, 3), UsageError),
        (lambda e: e.divide(0, 0, 5, 0), UsageError),
        (lambda e: e.checkpoints, UsageError),
    ],
)
def test_what_is_refused_leaves_no_trace(
    engine: Engine,
    edit: object,
    fault: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed(engine, 0, TEXT, 0, 20)
    feed(engine, 1, OTHER, 0, 12)
    with pytest.raises(fault):
        edit(engine)  # type: ignore[operator]
    plans = watch(engine, monkeypatch)
    found = feed(engine, 0, TEXT, 20, 21)
    assert made(plans[0]) == 0
    engine.clear(0)
    np.testing.assert_allclose(found, feed(engine, 0, TEXT, 0, 21)[20:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "edit",
    [
        lambda e: e.shift(0, 0, -1, 9),
        lambda e: e.shift(0, 7, -1, 5),
        lambda e: (e.shift(0, 15, -1, 2), e.shift(0, 7, 15, 2)),
        lambda e: e.shift(0, 12, -1, -1),
        lambda e: e.divide(0, 0, -1, 3),
        lambda e: e.divide(0, 6, -1, 1),
    ],
)
def test_moved_tokens_are_as_if_decoded_there(engine: Engine, edit: object) -> None:
    """The one attention layer is the last, so that its rows depend on no other token's position."""
    feed(engine, 1, OTHER, 0, 10)
    feed(engine, 0, TEXT, 0, 21)
    edit(engine)  # type: ignore[operator]
    places = np.asarray(engine.positions(0))
    start = engine.following(0)
    later = start + np.arange(12)
    found = engine.decode(Batch.of(TEXT[21:33], later, [0] * 12, logits=True))
    cold = np.concatenate((places[:, 0], later))
    engine.clear(2)
    wanted = engine.decode(Batch.of(TEXT[:33], cold, [2] * 33, logits=True))
    np.testing.assert_allclose(found, wanted[21:], rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        feed(engine, 1, OTHER, 10, 20), wanted_of(engine, OTHER), rtol=0, atol=1e-5
    )


def wanted_of(engine: Engine, text: list[int]) -> NDArray[np.float32]:
    """Logits of tokens 10 to 19 of a text that no other has touched."""
    engine.clear(2)
    return feed(engine, 2, text, 0, 20)[10:]


def test_what_cannot_move_is_refused(opened: dict[RowSharing, Engine]) -> None:
    """An image, and rows that another sequence shares."""
    engine = opened[RowSharing.PER_STREAM]
    engine.clear()
    places = [[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [3, 3, 3]]
    engine.decode(Batch.of(TEXT[:5], places, [0] * 5))
    with pytest.raises(UsageError, match="holds an image"):
        engine.shift(0, 0, -1, 4)
    assert np.asarray(engine.positions(0)).tolist() == places
    shared = opened[RowSharing.UNIFIED]
    shared.clear()
    feed(shared, 0, TEXT, 0, 9)
    shared.copy(0, 1)
    with pytest.raises(UsageError, match="shares rows with another"):
        shared.shift(1, 0, -1, 4)


def test_memory_counts_every_byte(engine: Engine) -> None:
    held = sum(buffer.array.nbytes for buffer in engine._store.caches.values())
    assert engine.memory.total == held
    assert sum(engine.memory.breakdown()["cpu"].values()) == held


def test_a_bundle_without_snapshots_goes_back_to_nothing_only(
    bundles: Bundles, tmp_path: Path
) -> None:
    checkpoint = bundles.qwen_checkpoint("plain", index_heads=16)
    capacity = Capacity(context=64, sequences=1, max_step=16, rewind=0)
    with open_engine(bundles.bundle(checkpoint, capacity=capacity)) as engine:
        wanted = feed(engine, 0, TEXT, 0, 20)
        assert engine.reachable(0) == (range(1), range(20, 21))
        with pytest.raises(RewindError, match="it can stand at 0, 20"):
            engine.rewind(0, 19)
        engine.rewind(0, 0)
        np.testing.assert_allclose(feed(engine, 0, TEXT, 0, 20), wanted, rtol=0, atol=1e-5)
