"""The rules of rows and padding that concern the host, one test each (DESIGN, section 6)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.plan_model import POISON
from support.plan_world import World, config

from cachegraph.models.buckets import Bucket
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, Contract, Role
from cachegraph.models.errors import ContractError, PlanError
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.planners.compressor import CompressorSizes, PlanTokens, plan_compressor
from cachegraph.runtime.planners.step import StepPlan, StepSizes, pick_bucket, plan_step
from cachegraph.runtime.planners.validate import (
    validate_compressor,
    validate_raw,
    validate_tokens,
)
from cachegraph.runtime.split import split_batch

pytestmark = pytest.mark.r0

KINDS = (CacheKind.CSA, CacheKind.HCA)
WIDE = Bucket(streams=3, step=6, context=16, closes=KINDS, all_rows=True)


@pytest.fixture
def world() -> World:
    made = World(config(), Capacity(context=29, sequences=3, max_step=6, rewind=0))
    made.decode({0: 6, 2: 6})
    return made


def next_plan(world: World, counts: dict[int, int]) -> StepPlan:
    owners = [seq for seq, count in counts.items() for _ in range(count)]
    batch = Batch.of([1] * len(owners), None, owners, starts=world.cells.next_positions())
    (part,) = split_batch(batch, world.ladder)
    return plan_step(world.sizes, world.cells, part)


def test_rule_1_real_writes_stay_in_their_stream(world: World) -> None:
    buffers = world.judge(next_plan(world, {2: 1}), WIDE)
    raw, state = (
        world.contract.layout(CacheKind.RAW),
        world.contract.layout(CacheKind.CSA_STATE),
    )
    hca = world.contract.layout(CacheKind.HCA)
    assert buffers["plan.raw.write_idxs"][0] == raw.base(2) + 6
    assert (
        buffers["plan.csa.state_persist_dst_idxs"][0]
        == state.base(2) + 6 % state.rows_per_stream
    )
    assert buffers["plan.hca.state_write_idxs"][0] == hca.base(2)


@pytest.mark.parametrize(
    ("name", "kind", "real"),
    [
        ("plan.raw.write_idxs", CacheKind.RAW, 1),
        ("plan.csa.state_persist_dst_idxs", CacheKind.CSA_STATE, 1),
        ("plan.hca.state_persist_dst_idxs", CacheKind.HCA_STATE, 1),
        ("plan.csa.state_write_idxs", CacheKind.CSA, 0),
        ("plan.hca.state_write_idxs", CacheKind.HCA, 1),
    ],
)
def test_rule_2_each_padded_write_has_a_spare_row_of_its_own(
    world: World, name: str, kind: CacheKind, real: int
) -> None:
    written = world.judge(next_plan(world, {2: 1}), WIDE)[name]
    start = world.contract.layout(kind).spare_start
    spare = sorted(row for row in written.tolist() if row >= start)
    assert spare == list(range(start, start + written.size - real))
    assert spare[-1] < world.contract.layout(kind).rows


def test_rule_3_padded_reads_repeat_valid_rows(world: World) -> None:
    """Stream 0 of the call reads 5 raw rows; the rest of its list repeats the last of them."""
    buffers = world.judge(next_plan(world, {2: 1}), WIDE)
    reads = buffers["plan.raw.read_idxs"]
    assert buffers["plan.raw.read_counts"].tolist() == [5, 0, 0]
    assert set(reads[0, 5:]) == {reads[0, 4]}
    assert (reads[1:] == reads[0]).all()
    rows = buffers["plan.csa.rows"][0]
    last = world.contract.layout(CacheKind.CSA).base(3) - 1
    assert rows.tolist() == [*range(last - 9, last + 1), *[last] * 6]


def test_rule_4_sentinels_of_missing_windows_and_padded_blocks() -> None:
    world = World(config(), Capacity(context=29, sequences=1, max_step=6))
    plan = next_plan(world, {0: 3})
    buffers = world.judge(plan, Bucket(streams=1, step=6, context=8, closes=KINDS))
    state = world.contract.layout(CacheKind.CSA_STATE)
    old = buffers["plan.csa.state_old_idxs"]
    reads = buffers["plan.csa.state_read_idxs"]
    assert set(old[reads[0, :3]]) == {state.sentinel("no_previous_window")}
    assert set(old[reads[1]]) == {state.sentinel("padded_block")}
    hca = world.contract.layout(CacheKind.HCA_STATE)
    old, reads = buffers["plan.hca.state_old_idxs"], buffers["plan.hca.state_read_idxs"]
    assert set(old[reads[0]]) == {hca.sentinel("padded_block")}


def test_every_element_is_written_in_every_step(world: World) -> None:
    """`judge` fills buffers with poison first; nothing of it may stay, in any bucket that fits."""
    for bucket in (
        WIDE,
        Bucket(streams=1, step=1, context=4, closes=KINDS),
        Bucket(streams=2, step=4, context=8, closes=KINDS, all_rows=True),
    ):
        buffers = world.judge(next_plan(world, {2: 1}), bucket)
        names = {row.name for row in world.contract.inputs if row.role is not Role.CACHE}
        assert buffers.keys() == names
        assert not any(POISON in buffer for buffer in buffers.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"closes": ()}, "hca plan: 1 blocks close, the bucket has room for 0"),
        ({"context": 1}, "csa plan: 2 rows are visible, the bucket exposes 1"),
        ({"step": 1}, r"tokens: the plan has \(1, 2\) entries, the bucket \(1, 1\)"),
    ],
)
def test_a_bucket_that_is_too_small_is_refused(
    world: World, changes: dict[str, Any], message: str
) -> None:
    plan = next_plan(world, {0: 2})
    bucket = dataclasses.replace(pick_bucket(world.specs, world.ladder, plan), **changes)
    with pytest.raises(PlanError, match=message):
        world.judge(plan, bucket)


SIZES = CompressorSizes(ratio=3, overlap=True, ring_rows=6, rows_per_stream=4, streams=2)


def edited(**fields: Any) -> tuple[str, CompressorSizes, Any, int]:
    """A valid plan of tokens 2 and 3 of sequence 1 with some fields changed."""
    tokens = PlanTokens.of_owners(np.array([2, 3]), ((1,), (1,)))
    plan = plan_compressor(SIZES, tokens)
    validate_compressor("csa", SIZES, plan, 2)
    lists = {k: np.array(v) if isinstance(v, list) else v for k, v in fields.items()}
    return "csa", SIZES, dataclasses.replace(plan, **lists), 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state_pos": [2, 3]}, r"csa plan: state_pos\[1\]: 3 is outside 0 to 2"),
        ({"state_pos": [2]}, "state_pos: has 1 entries, wanted 2"),
        ({"state_delta_src_idxs": [0, 2]}, r"state_delta_src_idxs\[1\]: 2 is outside 0 to 1"),
        (
            {"state_delta_dst_idxs": [12, 9]},
            r"state_delta_dst_idxs\[0\]: 12 is outside 0 to 11",
        ),
        ({"state_persist_src_idxs": [0, -1]}, r"persist_src_idxs\[1\]: -1 is outside 0 to 1"),
        ({"state_persist_dst_idxs": [8, 12]}, r"persist_dst_idxs\[1\]: 12 is outside 0 to 11"),
        ({"state_persist_dst_idxs": [8, 8]}, r"persist_dst_idxs\[1\]: row 8 is written twice"),
        ({"state_persist_src_idxs": [0]}, "state_persist_src_idxs: has 1 entries, wanted 2"),
        ({"state_read_idxs": [0] * 5}, "state_read_idxs: has 5 entries, wanted 6"),
        ({"state_read_idxs": [0] * 5 + [15]}, r"read_idxs\[5\]: 15 is outside 0 to 14"),
        ({"state_write_idxs": [8]}, r"state_write_idxs\[0\]: 8 is outside 0 to 7"),
        ({"state_write_pos": [12]}, r"state_write_pos\[0\]: 12 is outside 0 to 11"),
        ({"n_visible": [1, 5]}, r"n_visible\[1\]: 5 is outside 0 to 4"),
        ({"num_exposed": 5}, "5 rows exposed of 4"),
        ({"num_exposed": 0}, "0 rows exposed of 4"),
    ],
)
def test_rule_8_a_wrong_compressor_plan_names_field_position_and_bound(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        validate_compressor(*edited(**fields))


def test_rule_8_only_an_overlapping_compressor_names_no_previous_window() -> None:
    sizes = dataclasses.replace(SIZES, overlap=False, ring_rows=3)
    plan = plan_compressor(sizes, PlanTokens.of_owners(np.array([2]), ((0,),)))
    sentinel = np.array([*plan.state_read_idxs[:-1], sizes.state_rows + 1])
    with pytest.raises(
        PlanError, match=r"hca plan: state_read_idxs\[2\]: 7 is outside 0 to 6"
    ):
        validate_compressor(
            "hca", sizes, dataclasses.replace(plan, state_read_idxs=sentinel), 1
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"write_idxs": [33]}, r"raw plan: write_idxs\[0\]: 33 is outside 0 to 32"),
        ({"read_idxs": [22, 23, 24, 25, -1]}, r"read_idxs\[4\]: -1 is outside 0 to 32"),
        ({"read_counts": [4]}, "read_counts, summed: has 4 entries, wanted 5"),
        ({"read_pos": [2]}, "read_pos: has 1 entries, wanted 5"),
        ({"write_idxs": [27]}, "row 27 is reserved for position 5, the token's is 6"),
        ({"write_idxs": [28, 28]}, r"write_idxs\[1\]: row 28 is written twice, first at 0"),
    ],
)
def test_rule_8_a_wrong_raw_plan_names_field_position_and_bound(
    world: World, fields: dict[str, Any], message: str
) -> None:
    plan = next_plan(world, {2: 1})
    raw = dataclasses.replace(plan.raw, **{k: np.array(v) for k, v in fields.items()})
    view = world.cells.after(plan.reservation)
    with pytest.raises(PlanError, match=message):
        validate_raw(raw, view, plan.ubatch.positions, num_rows=world.sizes.raw_rows)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([31, 32], r"csa plan: n_visible\[1\]: 11 is outside 0 to 10"),
        ([6, 6], r"raw plan: write_idxs\[1\]: row 6 is written twice"),
    ],
)
def test_rule_8_a_step_plan_is_a_valid_one(
    world: World, positions: list[int], message: str
) -> None:
    """What the batch checker would have refused: past the context, and a repeat."""
    (part,) = split_batch(Batch.of([1, 1], [6, 7]), world.ladder)
    part = dataclasses.replace(part, positions=np.array(positions))
    with pytest.raises(PlanError, match=message):
        plan_step(world.sizes, world.cells, part)


def test_rule_8_caches_of_one_plan_agree_in_their_rows(world: World) -> None:
    def resized(cache: Any) -> Any:
        layout = dataclasses.replace(cache.layout, rows_per_stream=9)
        is_lid = cache.kind is CacheKind.LID
        return dataclasses.replace(cache, layout=layout) if is_lid else cache

    caches = tuple(resized(cache) for cache in world.contract.caches)
    broken = Contract(rows=world.contract.rows, caches=caches)
    with pytest.raises(
        ContractError, match=r"one plan serves .*'csa', 'lid'.* layouts differ"
    ):
        StepSizes.of(world.specs, broken)


@pytest.mark.parametrize(
    ("positions", "message"),
    [([3, 3], "3 is repeated in sequence 1"), ([0, -1], r"positions\[1\]: -1 is negative")],
)
def test_rule_9_planners_take_distinct_positions_from_0(
    positions: list[int], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        validate_tokens(PlanTokens.of_owners(np.array(positions), ((1,), (1,))))


def test_rule_9_the_compressor_plans_any_order_and_any_gap() -> None:
    """Blocks close in token order; the ring keeps the largest position of each row."""
    tokens = PlanTokens.of_owners(np.array([11, 2, 8, 5]), ((0,), (0,), (1,), (0,)))
    plan = plan_compressor(SIZES, tokens)
    assert plan.state_write_idxs.tolist() == [3, 0, 6, 1]
    assert plan.state_write_pos.tolist() == [9, 0, 6, 3]
    assert plan.state_persist_dst_idxs.tolist() == [2, 5, 8]
    assert plan.state_persist_src_idxs.tolist() == [1, 0, 2]
