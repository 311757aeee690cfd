"""The cell table of the raw rows: which position each row holds, and for which sequences.

Reserving is pure; `commit` and `clear` are the only writers, so a step that fails leaves no trace
and needs no undo. Knows nothing of compressed rows, which are addressed by position alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cachegraph.models.contract import RowLayout
from cachegraph.models.errors import CapacityError
from cachegraph.runtime.batch import BoolArray, IntArray
from cachegraph.runtime.split import UBatch

EMPTY = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class CellView:
    """A table to plan on.

    positions: int64 [cells], EMPTY where free. members: bool [sequences, cells]. rows: int64
    [cells], the cache row of each cell; None where cell i is row i.
    """

    positions: IntArray
    members: BoolArray
    rows: IntArray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Rows that a ubatch would take: one row, position and sequence for each token, [T] each."""

    rows: IntArray
    positions: IntArray
    sequences: IntArray


class CellTable:
    """Raw rows of a `per_stream` cache.

    Position p of stream s takes row s * rows_per_stream + p mod rows_per_stream. Cells that no
    window reaches are overwritten.
    """

    def __init__(self, layout: RowLayout, window: int) -> None:
        self.layout = layout
        self.window = window
        self._positions = np.full(layout.live_rows, EMPTY, np.int64)
        self._members = np.zeros((layout.streams, layout.live_rows), np.bool_)
        self._ends = np.zeros(layout.streams, np.int64)

    def next_position(self, sequence: int) -> int:
        """The position that a sequence expects next."""
        return int(self._ends[sequence])

    def next_positions(self) -> dict[int, int]:
        """The position that every sequence expects next."""
        return dict(enumerate(self._ends.tolist()))

    def reserve(self, ubatch: UBatch) -> Reservation:
        """Rows for a ubatch; CapacityError where a row that is still visible would be lost."""
        sequences = np.repeat(np.array(ubatch.streams, np.int64), ubatch.step)
        size = self.layout.rows_per_stream
        if ubatch.step > size:
            raise CapacityError(
                f"a step of {ubatch.step} tokens does not fit the {size} raw rows of a sequence; "
                "send fewer at once"
            )
        rows = sequences * size + ubatch.positions % size
        self._check_hidden(rows)
        return Reservation(rows=rows, positions=ubatch.positions, sequences=sequences)

    def after(self, reservation: Reservation) -> CellView:
        """The table as it would be after `commit`, as a copy."""
        positions, members = self._positions.copy(), self._members.copy()
        _place(positions, members, reservation)
        return CellView(positions=positions, members=members)

    def commit(self, reservation: Reservation) -> None:
        """Take the reserved rows."""
        _place(self._positions, self._members, reservation)
        np.maximum.at(self._ends, reservation.sequences, reservation.positions + 1)

    def check_room(self, ubatches: Iterable[UBatch]) -> None:
        """CapacityError unless all ubatches of a batch can be placed one after another."""
        trial = CellTable(self.layout, self.window)
        trial._positions, trial._members = self._positions.copy(), self._members.copy()
        trial._ends = self._ends.copy()
        for ubatch in ubatches:
            trial.commit(trial.reserve(ubatch))

    def clear(self, sequence: int) -> None:
        """Forget a sequence; rows that only it owned become free."""
        self._members[sequence] = False
        self._positions[~self._members.any(axis=0)] = EMPTY
        self._ends[sequence] = 0

    def truncate(self, sequence: int, position: int) -> None:
        """Give back the cells of a sequence from `position` on."""
        for rows in self._spans(sequence, position, self.next_position(sequence)):
            self._members[sequence, rows] = False
            self._positions[rows] = EMPTY
        self._ends[sequence] = position

    def holds(self, sequence: int, first: int, end: int) -> bool:
        """Whether every position from `first` to `end` - 1 has a cell of the sequence."""
        if end - first > self.layout.rows_per_stream:
            return False
        return all(
            bool(self._members[sequence, rows].all())
            and first <= int(self._positions[rows].min())
            and int(self._positions[rows].max()) < end
            for rows in self._spans(sequence, first, end)
            if rows.start < rows.stop
        )

    def _spans(self, sequence: int, first: int, end: int) -> Iterator[slice]:
        """The rows of positions `first` to `end` - 1, of the newest of them if there are more."""
        size, base = self.layout.rows_per_stream, self.layout.base(sequence)
        count = min(end - first, size)
        start = (end - count) % size
        yield slice(base + start, base + min(start + count, size))
        if start + count > size:
            yield slice(base, base + start + count - size)

    def first_held(self, sequence: int) -> int:
        """The first position from which on all are held; the next one where none is."""
        held = np.sort(self._positions[self._members[sequence]])
        if not held.size:
            return self.next_position(sequence)
        gaps = (np.diff(held) != 1).nonzero()[0]
        return int(held[gaps[-1] + 1] if gaps.size else held[0])

    def place(self, sequence: int, first: int, end: int) -> None:
        """Give a sequence that holds nothing the cells of positions `first` to `end` - 1."""
        positions = np.arange(first, end)
        rows = self.layout.base(sequence) + positions % self.layout.rows_per_stream
        self._positions[rows] = positions
        self._members[sequence, rows] = True
        self._ends[sequence] = end

    def own_rows(self, sequence: int) -> IntArray:
        """Rows that no other sequence uses: the whole block of its stream, ascending."""
        return self.layout.base(sequence) + np.arange(self.layout.rows_per_stream)

    def offsets(self, sequence: int) -> IntArray:
        """Rows of a sequence's cells, counted from the start of its stream."""
        offsets: IntArray = self._members[sequence].nonzero()[0] - self.layout.base(sequence)
        return offsets

    def copy(self, source: int, target: int) -> None:
        """Give `target`, which holds nothing, cells at the offsets and positions of `source`."""
        offsets = self.offsets(source)
        rows = self.layout.base(target) + offsets
        self._positions[rows] = self._positions[self.layout.base(source) + offsets]
        self._members[target, rows] = True
        self._ends[target] = self._ends[source]

    def _check_hidden(self, rows: IntArray) -> None:
        held = self._positions[rows]
        seen = self._members[:, rows] & (held > (self._ends - self.window)[:, None])
        if seen.any():
            sequence, column = (int(i) for i in np.argwhere(seen)[0])
            raise CapacityError(
                f"raw row {rows[column]} holds position {held[column]} of sequence {sequence}, "
                f"which its window of {self.window} still sees; send fewer tokens at once"
            )


def _place(positions: IntArray, members: BoolArray, reservation: Reservation) -> None:
    positions[reservation.rows] = reservation.positions
    members[reservation.sequences, reservation.rows] = True
