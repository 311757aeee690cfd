"""The right answer for each fault of the originals, by the fault's number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.plan_world import World, config

from cachegraph.models.buckets import Bucket
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind
from cachegraph.models.errors import BatchError
from cachegraph.models.planner_specs import dims
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.coupled import decoupled
from cachegraph.runtime.planners.step import plan_step
from cachegraph.runtime.split import split_batch
from cachegraph.tools.conformance.ours import answer, reserve_blocks
from cachegraph.tools.conformance.scenario import Compact, CompressorCase, Scenario

pytestmark = pytest.mark.r0

CSA = CompressorCase(ratio=4, overlap=True, ring_rows=8, rows=512)
Cells = Sequence[tuple[int, tuple[int, ...]]]


def scenario(
    cells: Cells,
    ids: Sequence[tuple[int, ...]],
    positions: Sequence[int],
    *,
    head: int,
    num_streams: int = 3,
    compact: Compact | None = None,
    compressors: tuple[CompressorCase, ...] = (CSA,),
    reserve: bool = False,
) -> Scenario:
    return Scenario(
        id="made",
        kind="made",
        num_streams=num_streams,
        cells=tuple(cells),
        head=head,
        compact=compact,
        positions=np.array(positions, np.int64),
        ids=tuple(ids),
        compressors=compressors,
        reserve=reserve,
        recorded={},
    )


def own_cells(ids: Sequence[tuple[int, ...]], positions: Sequence[int]) -> Cells:
    return list(zip(positions, ids, strict=True))


def comp_plan(made: Scenario) -> Any:
    return answer(made)["comp"][0]["plan"]


def world(**sizes: int) -> World:
    return World(config(), Capacity(**{"context": 29, "sequences": 6, "max_step": 6} | sizes))


def test_rule_1_any_set_of_sequences_works() -> None:
    made = world()
    made.decode({0: 3, 2: 3, 5: 3})
    made.decode({5: 1, 2: 1})
    ids, positions = [(0,), (2,)], [0, 0]
    out = answer(scenario(own_cells(ids, positions), ids, positions, head=0))
    assert out["comp_sinfo_errors"] is False
    assert out["raw"]["raw"]["read_counts"] == [1, 1]


def test_rule_2_tokens_become_stream_major_and_outputs_map_back() -> None:
    made = world()
    batch = Batch.of(range(6), None, [4, 1, 4, 1, 1, 4], logits=[1, 0, 0, 0, 1, 1])
    (part,) = split_batch(batch, made.ladder)
    assert part.streams == (1, 4)
    assert part.source.tolist() == [1, 3, 4, 0, 2, 5]
    assert part.tokens.tolist() == [1, 3, 4, 0, 2, 5]
    assert part.wants_logits.tolist() == [False, False, True, True, False, True]


def test_rule_3_unequal_counts_are_split() -> None:
    made = world()
    made.decode({0: 5, 3: 2, 1: 1})
    assert made.cells.next_positions() == {0: 5, 1: 1, 2: 0, 3: 2, 4: 0, 5: 0}
    ids, positions = [(0,), (1,), (1,)], [0, 0, 1]
    out = answer(scenario(own_cells(ids, positions), ids, positions, head=0))
    assert out["raw"]["ok"]
    assert out["raw"]["raw"]["sinfo_read"]["idxs"] == [[0], [1, 2]]


def test_rule_4_coupled_tokens_need_one_history() -> None:
    together = [(0, 1)] * 4
    out = answer(scenario(own_cells(together, range(4)), together, range(4), head=0))
    assert out["raw"]["raw"]["read_counts"] == [4]
    assert out["comp"][0]["plan"]["state_write_idxs"] == [0, 512]
    assert out["comp"][0]["plan"]["state_persist_dst_idxs"] == [0, 1, 2, 3, 8, 9, 10, 11]
    apart: Cells = [(0, (0,)), (1, (0, 1))]
    assert answer(scenario(apart, [(0, 1)], [1], head=1))["raw"] == {"ok": False}
    held = {0: (5,), 1: (6,)}
    with pytest.raises(BatchError, match="decode it once for each sequence"):
        decoupled(Batch.of([5], [1], [(0, 1)]), held.__getitem__)


def test_rule_5_repeated_positions_are_refused() -> None:
    ids, positions = [(0,)] * 3, [2, 3, 3]
    out = answer(scenario(own_cells(ids, positions), ids, positions, head=0))
    assert out["raw"] == {"ok": False}
    assert out["comp"] == [{"refused": True}]
    with pytest.raises(
        BatchError, match="token 1: repeat in sequence 0: position 0, wanted 1"
    ):
        world().check(Batch.of([5, 5], [0, 0]))


def test_rule_6_padded_blocks_go_to_spare_rows_when_the_cache_is_full() -> None:
    """The last token of a full context, in a bucket with room for a second block."""
    made = world(context=21, sequences=1)
    made.decode({0: 20})
    (part,) = split_batch(Batch.of([1], [20]), made.ladder)
    plan = plan_step(made.sizes, made.cells, part)
    kinds = (CacheKind.CSA, CacheKind.HCA)
    assert [plan.compressors[kind].num_exposed for kind in kinds] == [7, 3]
    buffers = made.judge(plan, Bucket(streams=1, step=4, context=8, closes=kinds))
    spare = made.contract.layout(CacheKind.CSA).spare_start
    assert buffers["plan.csa.state_write_idxs"].tolist() == [6, spare]


def test_rule_6_a_full_cache_has_no_visible_dummy() -> None:
    full = CompressorCase(ratio=4, overlap=True, ring_rows=8, rows=256)
    made = scenario([(1024, (0,))], [(0,)], [1024], head=0, compressors=(full,))
    assert comp_plan(made)["state_write_idxs"] == [3 * 256]


def test_rule_7_negative_positions_are_refused() -> None:
    ids, positions = [(0,)] * 2, [-1, 0]
    out = answer(scenario(own_cells(ids, positions), ids, positions, head=0))
    assert out["raw"] == {"ok": False}
    assert out["comp"] == [{"refused": True}]
    with pytest.raises(BatchError, match="token 0: position -1 is negative"):
        world().check(Batch.of([5], [-1]))


def compacted(cells: Cells, ids: Sequence[tuple[int, ...]], positions: Sequence[int]) -> Any:
    compact = Compact(num_rows=16, sink_rows=2, head=4, base=10)
    head = len(cells) - len(ids)
    return answer(scenario(cells, ids, positions, head=head, compact=compact))["raw"]


def test_rule_8_a_compacted_cache_has_one_addressing() -> None:
    past: Cells = [(position, (0,)) for position in range(12)]
    raw = compacted([*past, (12, (0,)), (13, (0,))], [(0,)] * 2, [12, 13])
    assert raw["raw"]["write_dst_idxs"] == [4, 5]
    assert raw["raw"]["sinfo_read"]["idxs"] == [
        [0, 1, 2, 3, 4, 5]
    ]  # two pinned rows, then 10..13


def test_rule_8_every_position_of_a_compacted_cache_is_checked() -> None:
    assert compacted([(12, (0,)), (14, (0,))], [(0,)] * 2, [12, 14]) == {"ok": False}


def test_rule_9_buckets_hold_every_unequal_batch() -> None:
    made = scenario([], [(0,), (1,), (1,)], [0, 0, 1], head=0, reserve=True)
    assert reserve_blocks(made, 4) == 2
    specs = world().specs
    for streams, step in ((1, 1), (3, 1), (2, 4), (3, 6)):
        room = dims(
            specs,
            Bucket(
                streams=streams, step=step, context=2, closes=(CacheKind.CSA, CacheKind.HCA)
            ),
        )
        for ratio, suffix in ((3, "C"), (7, "H")):
            most = max(
                sum((pos + 1) % ratio == 0 for pos in range(first, first + step))
                for first in range(ratio)
            )
            assert room["B" + suffix] >= streams * most


def test_rule_10_few_rows_and_huge_positions_work() -> None:
    few = CompressorCase(ratio=4, overlap=True, ring_rows=8, rows=40)
    made = scenario([(3, (0,))], [(0,)], [3], head=0, compressors=(few,))
    assert answer(made)["comp"][0]["valid"] is True
    last = 2**31 - 1
    assert comp_plan(scenario([(last, (0,))], [(0,)], [last], head=0))["n_visible"] == [2**29]
    world(context=2, sequences=1).decode({0: 2})


@pytest.mark.parametrize("owners", [(), (3,), (-1,), (0, 7)])
def test_rule_17_invalid_ids_are_refused(owners: tuple[int, ...]) -> None:
    out = answer(scenario([(3, owners)], [owners], [3], head=0))
    assert out["seq_ids_valid"] is False
    assert out["raw"] == {"ok": False}
    assert out["comp"] == [{"refused": True}]


def test_rule_17_without_positions_the_raw_plan_alone_is_refused() -> None:
    made = dataclasses.replace(scenario([(3, (7,))], [(7,)], [3], head=0), positions=None)
    assert answer(made)["raw"] == {"ok": False}
    assert answer(made)["comp"] == [None]


def test_rule_18_an_id_listed_twice_counts_once() -> None:
    made = scenario([(3, (0, 0))], [(0, 0)], [3], head=0)
    assert comp_plan(made)["state_write_idxs"] == [0]
    assert Batch.of([5], [0], [(0, 0)]).seq_ids == ((0,),)
