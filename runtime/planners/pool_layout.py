"""The pools of one sequence: its rows in rank order and how they group.

Rank is the order of (position, insertion). A layout grows on append and is built anew from the
cell table where it cannot. Knows nothing of batches, of other sequences or of which keys are in
the cache.

By order, a token's slot is its rank. By position, it is its position counted from the sequence's
first one, or the next free slot where a repeat has taken that: a missing position leaves a hole. A
pool is k ranks whose slots are consecutive and start at a multiple of k: a group with a hole has
none, as with a hole in the mask of the model that groups so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cachegraph.models.pooled_spec import Grouping
from cachegraph.runtime.batch import BoolArray, IntArray

NO_ROW = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCells:
    """A cell table to plan pools on; row = stream * cells_per_stream + cell.

    positions: int64 [rows], negative where free. members: bool [sequences, rows]. orders: int64
    [rows], the number of each token by insertion: distinct, later ones greater. places: int64
    [rows, 3], positions t, y and x; None where all three are `positions`. is_unified: one stream
    holds all sequences, else each has its own. counts: rows of each sequence, where they are known.
    """

    positions: IntArray
    members: BoolArray
    orders: IntArray
    is_unified: bool
    cells_per_stream: int
    places: IntArray | None = None
    counts: Sequence[int] | None = None

    def counted(self) -> Sequence[int]:
        """Rows of each sequence."""
        if self.counts is not None:
            return self.counts
        counts: list[int] = np.count_nonzero(self.members, axis=1).tolist()
        return counts

    def stream(self, sequence: int) -> int:
        """The stream whose rows a sequence takes."""
        return 0 if self.is_unified else sequence

    def base(self, sequence: int) -> int:
        """The first row of a sequence's stream."""
        return self.stream(sequence) * self.cells_per_stream


class Room:
    """Memory of a layout's rows that later layouts go on in, so that a step copies only its own.

    used: rows taken; a layout that ends there may go on, any other needs memory of its own.
    """

    def __init__(self, parts: IntArray, used: int) -> None:
        """parts: int64 [4, rows], the first `used` of which are taken."""
        self.parts, self.used = parts, used

    @classmethod
    def after(
        cls, room: Room | None, held: Sequence[IntArray], new: Sequence[IntArray]
    ) -> Room:
        """Memory that holds what a layout holds and then the new rows of each part."""
        start = held[0].size
        end = start + new[0].size
        if room is None or room.used != start or end > room.parts.shape[1]:
            room = cls(np.empty((len(held), max(64, 2 * end)), np.int64), start)
            for part, values in zip(room.parts, held, strict=True):
                part[:start] = values
        for part, values in zip(room.parts, new, strict=True):
            part[start:end] = values
        room.used = end
        return room


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLayout:
    """Rows of a sequence by rank, and its pools.

    positions, orders, rows, slots: [n]. starts: [m] rank of each pool's first member. reps: [m] row
    that holds its key, NO_ROW where none does yet. resume: rank from which later tokens may form
    pools. room: the memory behind the arrays of rows, for those that follow.
    """

    positions: IntArray
    orders: IntArray
    rows: IntArray
    slots: IntArray
    starts: IntArray
    reps: IntArray
    resume: int
    room: Room | None = None

    @property
    def num_pools(self) -> int:
        """Complete pools."""
        return int(self.starts.size)

    def members(self, size: int) -> IntArray:
        """Rows of each pool's members, [m, size]."""
        return grouped(self.rows, self.starts, size)

    def members_of(self, pools: IntArray, size: int) -> IntArray:
        """Rows of the members of some pools, [n, size]."""
        rows: IntArray = self.rows[self.starts[pools][:, None] + np.arange(size)]
        return rows

    def ranks(self, positions: IntArray, orders: IntArray) -> IntArray:
        """Ranks of tokens that the sequence holds, told by position and insertion number."""
        ranks: IntArray = self.positions.searchsorted(positions)
        ends = self.positions.searchsorted(positions, side="right")
        for at in (ends - ranks > 1).nonzero()[0].tolist():
            low, high = int(ranks[at]), int(ends[at])
            ranks[at] = low + self.orders[low:high].searchsorted(orders[at])
        return ranks


def grouped(values: IntArray, starts: IntArray, size: int) -> IntArray:
    """The values of each pool's members, [m, size]; a view where the pools follow each other."""
    count = starts.size
    if not count or (starts[0] == 0 and starts[-1] == (count - 1) * size):
        return values[: count * size].reshape(count, size)
    parts: IntArray = values[starts[:, None] + np.arange(size)]
    return parts


def build_layout(cells: PoolCells, sequence: int, size: int, grouping: Grouping) -> PoolLayout:
    """The layout of a sequence from the cell table alone, no key of it in the cache."""
    rows = cells.members[sequence].nonzero()[0]
    return grow_layout(_empty(), cells, rows, size, grouping)


def can_grow(layout: PoolLayout, cells: PoolCells, rows: IntArray) -> bool:
    """Whether new rows come after all of a layout: only then is no rank of it moved."""
    if not rows.size or not layout.positions.size:
        return True
    return int(cells.positions[rows].min()) >= int(layout.positions[-1])


def grow_layout(
    layout: PoolLayout, cells: PoolCells, rows: IntArray, size: int, grouping: Grouping
) -> PoolLayout:
    """A layout with rows that come after all of it; the old one is left as it is."""
    if not rows.size:
        return layout
    positions, orders = cells.positions[rows], cells.orders[rows]
    if rows.size > 1:
        by_rank = np.lexsort((orders, positions))
        positions, orders, rows = positions[by_rank], orders[by_rank], rows[by_rank]
    room = Room.after(
        layout.room,
        (layout.positions, layout.orders, layout.rows, layout.slots),
        (positions, orders, rows, _slots(layout, positions, grouping)),
    )
    all_positions, all_orders, all_rows, slots = room.parts[:, : room.used]
    starts, resume = _scan(slots, layout.resume, size)
    return PoolLayout(
        room=room,
        positions=all_positions,
        orders=all_orders,
        rows=all_rows,
        slots=slots,
        starts=np.concatenate((layout.starts, starts)),
        reps=np.concatenate((layout.reps, np.full(starts.size, NO_ROW))),
        resume=resume,
    )


def _empty() -> PoolLayout:
    none = np.zeros(0, np.int64)
    return PoolLayout(
        positions=none,
        orders=none,
        rows=none,
        slots=none,
        starts=none,
        reps=none,
        resume=0,
    )


def _slots(layout: PoolLayout, positions: IntArray, grouping: Grouping) -> IntArray:
    """Slots of tokens that come after a layout, in rank order."""
    count = layout.positions.size
    ranks = np.arange(count, count + positions.size)
    if grouping is Grouping.ORDER:
        return ranks
    first = int(layout.positions[0]) if count else int(positions[0])
    ahead = positions - first - ranks  # how far slots run ahead of ranks: never falls
    if count:
        ahead[0] = max(int(ahead[0]), int(layout.slots[-1]) - (count - 1))
    return np.maximum.accumulate(ahead) + ranks


def _scan(slots: IntArray, resume: int, size: int) -> tuple[IntArray, int]:
    """Ranks where pools start, from `resume` on, and where the next scan goes on."""
    last = slots.size - size  # the last rank that a pool could start at
    if last < resume:
        return np.zeros(0, np.int64), resume
    firsts, ends = slots[resume : last + 1], slots[resume + size - 1 :]
    starts = resume + ((firsts % size == 0) & (ends - firsts == size - 1)).nonzero()[0]
    behind = int(starts[-1]) + size if starts.size else resume
    return starts, max(behind, last + 1)
