"""The cell table: reserving changes nothing, committing does, visible rows are never lost."""

from __future__ import annotations

import numpy as np
import pytest

from cachegraph.models.contract import RowLayout
from cachegraph.models.errors import CapacityError
from cachegraph.models.planner_specs import RawSpec
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.cells import EMPTY, CellTable
from cachegraph.runtime.planners.raw import plan_raw
from cachegraph.runtime.split import UBatch

pytestmark = pytest.mark.r0

LAYOUT = RowLayout(rows_per_stream=8, streams=3, spare_rows=5)


def ubatch(seq: int, first: int, count: int) -> UBatch:
    batch = Batch.of([1] * count, range(first, first + count), [seq] * count)
    return UBatch(
        tokens=batch.tokens,
        positions=batch.positions,
        streams=(seq,),
        step=count,
        source=np.arange(count),
        wants_logits=batch.wants_logits,
    )


def table(*parts: UBatch, window: int = 5) -> CellTable:
    cells = CellTable(LAYOUT, RawSpec(window=window))
    for part in parts:
        cells.commit(cells.reserve(part))
    return cells


def state(cells: CellTable) -> tuple[list[int], list[list[bool]], dict[int, int]]:
    view = cells.after(cells.reserve(ubatch(0, cells.next_position(0), 0)))
    return view.positions.tolist(), view.members.tolist(), cells.next_positions()


def test_rows_are_those_of_the_stream_and_the_position() -> None:
    cells = table(ubatch(2, 0, 7))
    assert cells.reserve(ubatch(2, 7, 3)).rows.tolist() == [23, 16, 17]
    assert cells.next_positions() == {0: 0, 1: 0, 2: 7}


def test_reserving_and_looking_ahead_change_nothing() -> None:
    cells = table(ubatch(0, 0, 4))
    before = state(cells)
    reservation = cells.reserve(ubatch(0, 4, 3))
    view = cells.after(reservation)
    assert view.positions[:8].tolist() == [0, 1, 2, 3, 4, 5, 6, EMPTY]
    cells.check_room([ubatch(0, 4, 3), ubatch(0, 7, 3)])
    assert state(cells) == before


def test_rows_behind_the_window_are_overwritten() -> None:
    cells = table(ubatch(0, 0, 8))
    cells.commit(cells.reserve(ubatch(0, 8, 3)))
    assert cells.next_position(0) == 11


def test_a_row_that_is_still_visible_is_never_overwritten() -> None:
    """Position 8 sees 4 .. 8: a step of 4 would take the row of position 3, one of 5 that of 4."""
    cells = table(ubatch(0, 0, 8))
    cells.reserve(ubatch(0, 8, 4))
    before = state(cells)
    with pytest.raises(
        CapacityError,
        match=r"raw row 4 holds position 4 of sequence 0, .* window of 5 still sees",
    ):
        cells.reserve(ubatch(0, 8, 5))
    with pytest.raises(CapacityError):
        cells.check_room([ubatch(0, 8, 4), ubatch(0, 12, 8)])
    assert state(cells) == before


def test_a_step_longer_than_the_rows_is_refused() -> None:
    with pytest.raises(CapacityError, match="a step of 9 tokens does not fit the 8 raw rows"):
        table().reserve(ubatch(0, 0, 9))


def test_clear_forgets_one_sequence() -> None:
    cells = table(ubatch(0, 0, 3), ubatch(1, 0, 2))
    cells.clear(0)
    positions, members, ends = state(cells)
    assert positions[:8] == [EMPTY] * 8
    assert positions[8:10] == [0, 1]
    assert not any(members[0])
    assert ends == {0: 0, 1: 2, 2: 0}
    cells.commit(cells.reserve(ubatch(0, 0, 1)))


def test_the_raw_plan_lists_only_rows_that_some_query_sees() -> None:
    cells = table(ubatch(1, 0, 8))
    part = ubatch(1, 8, 3)
    reservation = cells.reserve(part)
    plan = plan_raw(
        cells.after(reservation),
        write_idxs=reservation.rows,
        streams=(1,),
        oldest=np.array([8 - 4]),
    )
    assert plan.write_idxs.tolist() == [8, 9, 10]
    assert plan.read_idxs.tolist() == [8, 9, 10, 12, 13, 14, 15]
    assert plan.read_pos.tolist() == [8, 9, 10, 4, 5, 6, 7]
    assert plan.read_counts.tolist() == [7]
