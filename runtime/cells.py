"""The cell table of the raw rows: which position each row holds, and for which sequences.

Reserving is pure; `commit` and `clear` are the only writers, so a step that fails leaves no trace
and needs no undo. Knows nothing of compressed rows, which are addressed by position alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Self

import numpy as np

from cachegraph.models.contract import RowLayout
from cachegraph.models.errors import CapacityError
from cachegraph.models.planner_specs import RawSpec
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

    A stream's rows are one for each pinned position, then a ring for the others. Cells that no
    token sees are overwritten.
    """

    def __init__(self, layout: RowLayout, raw: RawSpec) -> None:
        self.layout = layout
        self.raw = raw
        self.ring = layout.rows_per_stream - raw.pinned
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
        if ubatch.step > self.ring:
            raise CapacityError(
                f"a step of {ubatch.step} tokens does not fit the {self.ring} raw rows of a "
                "sequence; send fewer at once"
            )
        rows = self.rows_of(sequences, ubatch.positions)
        self._check_hidden(sequences, rows)
        return Reservation(
            rows=self._writable(rows), positions=ubatch.positions, sequences=sequences
        )

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
        trial = self._trial()
        for ubatch in ubatches:
            trial.commit(trial.reserve(ubatch))

    def clear(self, sequence: int) -> None:
        """Forget a sequence; rows that only it owned become free."""
        self._members[sequence] = False
        self._positions[~self._members.any(axis=0)] = EMPTY
        self._ends[sequence] = 0

    def truncate(self, sequence: int, position: int) -> None:
        """Give back the cells of a sequence from `position` on."""
        for span in self._spans(position, self.next_position(sequence)):
            rows = self._rows(sequence, span)
            self._members[sequence, rows] = False
            self._forget(rows)
        self._ends[sequence] = position

    def holds(self, sequence: int, first: int, end: int) -> bool:
        """Whether every position from `first` to `end` - 1 has a cell of the sequence.

        Cells are taken and lost in the order of their positions, so that those behind the oldest
        of a run are held where that one is.
        """
        if first >= end:
            return True
        oldest = max(first, self.raw.pinned)
        if end > self.next_position(sequence) or end - oldest > self.ring:
            return False
        runs = {first, oldest} if oldest < end else {first}
        return all(self._holds(sequence, position) for position in runs)

    def _holds(self, sequence: int, position: int) -> bool:
        row = self.rows_of(sequence, np.array([position]))[0]
        return bool(self._positions[row] == position and self._members[sequence, row])

    def first_held(self, sequence: int) -> int:
        """The first position behind the pinned ones from which on all are held.

        The next position where none is.
        """
        held = np.sort(self._positions[self._members[sequence]])
        held = held[held >= self.raw.pinned]
        if not held.size:
            return self.next_position(sequence)
        gaps = (np.diff(held) != 1).nonzero()[0]
        return int(held[gaps[-1] + 1] if gaps.size else held[0])

    def place(self, sequence: int, first: int, end: int) -> None:
        """Give a sequence the cells of positions `first` to `end` - 1, where it then ends."""
        positions = np.arange(first, end)
        rows = self.rows_of(sequence, positions)
        self._positions[rows] = positions
        self._members[sequence, rows] = True
        self._ends[sequence] = end

    def rows_of(self, sequence: int | IntArray, positions: IntArray) -> IntArray:
        """The rows of positions of a sequence, or of a sequence each."""
        return sequence * self.layout.rows_per_stream + self._offsets(positions)

    def own_rows(self, sequence: int) -> IntArray:
        """Rows that no other sequence uses: the whole block of its stream, ascending."""
        return self.layout.base(sequence) + np.arange(self.layout.rows_per_stream)

    def moves(self, source: int, target: int) -> tuple[IntArray, IntArray]:
        """Rows to copy so that `target` holds what `source` holds, and where they go."""
        rows = self._members[source].nonzero()[0]
        return rows, rows + self.layout.base(target) - self.layout.base(source)

    def copy(self, source: int, target: int) -> None:
        """Give `target`, which holds nothing, cells for all that `source` holds."""
        rows, places = self.moves(source, target)
        self._positions[places] = self._positions[rows]
        self._members[target, places] = True
        self._ends[target] = self._ends[source]

    def _trial(self) -> Self:
        """A copy to plan on."""
        trial = copy(self)
        trial._positions, trial._members = self._positions.copy(), self._members.copy()
        trial._ends = self._ends.copy()
        return trial

    def _writable(self, rows: IntArray) -> IntArray:
        """Rows that may take the positions to be written, given those that their slots have."""
        return rows

    def _rows(self, sequence: int, span: slice) -> slice | IntArray:
        """The rows of a stream's offsets."""
        base = self.layout.base(sequence)
        return slice(base + span.start, base + span.stop)

    def _forget(self, rows: slice | IntArray) -> None:
        """Empty rows that a sequence has left, where no other owns them."""
        self._positions[rows] = EMPTY

    def _offsets(self, positions: IntArray) -> IntArray:
        """Rows of positions, counted from the start of a stream."""
        pinned = self.raw.pinned
        if not pinned:
            return positions % self.ring
        return np.where(
            positions < pinned, positions, pinned + (positions - pinned) % self.ring
        )

    def _spans(self, first: int, end: int) -> Iterator[slice]:
        """Offsets of positions `first` to `end` - 1; behind the pinned ones of the newest only."""
        pinned = self.raw.pinned
        if first < min(end, pinned):
            yield slice(first, min(end, pinned))
        count = min(end - max(first, pinned), self.ring)
        if count > 0:
            start = (end - count - pinned) % self.ring
            yield slice(pinned + start, pinned + min(start + count, self.ring))
            if start + count > self.ring:
                yield slice(pinned, pinned + start + count - self.ring)

    def _check_hidden(self, sequences: IntArray, rows: IntArray) -> None:
        """CapacityError where a sequence still sees the row that it would give up, [T] each."""
        held = self._positions[rows]
        near = held > self._ends[sequences] - self.raw.window
        seen = self._members[sequences, rows] & (near | (held < self.raw.pinned))
        if seen.any():
            at = int(seen.argmax())
            raise CapacityError(
                f"raw row {rows[at]} holds position {held[at]} of sequence {sequences[at]}, "
                f"which its window of {self.raw.window} still sees; send fewer tokens at once"
            )


def _place(positions: IntArray, members: BoolArray, reservation: Reservation) -> None:
    positions[reservation.rows] = reservation.positions
    members[reservation.sequences, reservation.rows] = True
