"""The cell table of hybrid memory: which token every attention row holds, and for which sequences.

A sequence takes rows in the order in which its tokens come and gives them back from its end. Where
streams are separate its rows follow each other; in a unified cache it takes the lowest free ones,
and a copy shares rows. Reserving is pure; a trial leaves no trace. Knows nothing of pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from cachegraph.models.contract import RowLayout, RowSharing
from cachegraph.models.errors import CapacityError
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.cells import EMPTY, Reservation
from cachegraph.runtime.planners.pool_layout import PoolCells
from cachegraph.runtime.split import UBatch

_NO_ROWS = np.zeros(0, np.int64)


class HybridCells:
    """Rows of `layout`, each with its three positions, its insertion number and its owners."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.is_unified = layout.sharing is RowSharing.UNIFIED
        rows = layout.live_rows
        self._positions = np.full(rows, EMPTY, np.int64)
        self._orders = np.zeros(rows, np.int64)
        self._places = np.zeros((rows, 3), np.int64)
        self._members = np.zeros((layout.streams, rows), np.bool_)
        self._rows = [_NO_ROWS] * layout.streams  # of each sequence, with room at the end
        self._counts = [0] * layout.streams
        self._next_order = 0

    def count(self, sequence: int) -> int:
        """Tokens that a sequence holds."""
        return self._counts[sequence]

    def rows(self, sequence: int) -> IntArray:
        """Rows of a sequence's tokens, in their order."""
        return self._rows[sequence][: self._counts[sequence]]

    def positions(self, sequence: int) -> IntArray:
        """The (first) position of each token of a sequence: never falls."""
        held: IntArray = self._positions[self.rows(sequence)]
        return held

    def places(self, sequence: int) -> IntArray:
        """Positions t, y and x of each token of a sequence, [n, 3]."""
        held: IntArray = self._places[self.rows(sequence)]
        return held

    def last_place(self, sequence: int) -> IntArray | None:
        """Positions of a sequence's last token; None where it has none."""
        count = self._counts[sequence]
        return self._places[self._rows[sequence][count - 1]] if count else None

    def first_position(self, sequence: int) -> int:
        """The first position of a sequence that holds tokens."""
        return int(self._positions[self._rows[sequence][0]])

    def _view(self, counts: list[int]) -> PoolCells:
        """The table to plan pools on, as it is; not a copy."""
        return PoolCells(
            positions=self._positions,
            members=self._members,
            orders=self._orders,
            is_unified=self.is_unified,
            cells_per_stream=self._members.shape[1]
            if self.is_unified
            else self.layout.rows_per_stream,
            places=self._places,
            counts=counts,
        )

    def reserve(self, ubatch: UBatch) -> Reservation:
        """Rows for a ubatch; CapacityError where there are too few."""
        sequences = np.repeat(np.array(ubatch.streams, np.int64), ubatch.step)
        if self.is_unified:
            rows = self._free(sequences.size)
        else:
            starts = [self.layout.base(s) + self._counts[s] for s in ubatch.streams]
            rows = (np.array(starts)[:, None] + np.arange(ubatch.step)).ravel()
        return Reservation(rows=rows, positions=ubatch.positions, sequences=sequences)

    @contextmanager
    def trial(self, reservation: Reservation, places: IntArray) -> Iterator[PoolCells]:
        """The table with reserved rows taken, for as long as the block lasts."""
        self._take(reservation, places)
        more = np.bincount(reservation.sequences, minlength=len(self._counts)).tolist()
        try:
            yield self._view([a + b for a, b in zip(self._counts, more, strict=True)])
        finally:
            self._members[reservation.sequences, reservation.rows] = False
            self._positions[reservation.rows] = EMPTY

    def commit(self, reservation: Reservation, places: IntArray) -> None:
        """Take reserved rows. places: [T, 3]."""
        self._take(reservation, places)
        self._next_order += reservation.rows.size
        for sequence in dict.fromkeys(reservation.sequences.tolist()):
            self._extend(sequence, reservation.rows[reservation.sequences == sequence])

    def cut(self, sequence: int, count: int) -> None:
        """Keep the first `count` tokens of a sequence."""
        left = self.rows(sequence)[count:]
        self._members[sequence, left] = False
        self._positions[left[~self._members[:, left].any(axis=0)]] = EMPTY
        self._counts[sequence] = count

    def moves(self, source: int, target: int) -> tuple[IntArray, IntArray]:
        """Rows to copy so that `target` holds what `source` holds; none where rows are shared."""
        if self.is_unified:
            return _NO_ROWS, _NO_ROWS
        rows = self.rows(source)
        return rows, rows - self.layout.base(source) + self.layout.base(target)

    def copy(self, source: int, target: int) -> None:
        """Give `target`, which holds nothing, what `source` holds."""
        rows = self.rows(source)
        if not self.is_unified:
            _, places = self.moves(source, target)
            for part in (self._positions, self._orders, self._places):
                part[places] = part[rows]
            rows = places
        self._members[target, rows] = True
        self._extend(target, rows)

    def put(self, sequence: int, places: IntArray) -> None:
        """Give a sequence, which holds nothing, rows for tokens at these positions, [n, 3]."""
        count = len(places)
        start = self.layout.base(sequence)
        rows = self._free(count) if self.is_unified else start + np.arange(count)
        owners = np.full(count, sequence)
        self.commit(Reservation(rows=rows, positions=places[:, 0], sequences=owners), places)

    def move(self, sequence: int, ranks: slice, places: IntArray) -> None:
        """Give tokens of a sequence, which shares them with nobody, other positions."""
        rows = self.rows(sequence)[ranks]
        self._positions[rows], self._places[rows] = places[:, 0], places

    def is_shared(self, sequence: int) -> bool:
        """Whether another sequence owns a row of this one."""
        return bool(
            (np.count_nonzero(self._members[:, self.rows(sequence)], axis=0) > 1).any()
        )

    def own_rows(self, sequence: int) -> IntArray:
        """Rows that no other sequence uses, ascending; the whole stream where they are separate."""
        if not self.is_unified:
            base = self.layout.base(sequence)
            return base + np.arange(self.layout.rows_per_stream)
        rows = self.rows(sequence)
        return np.sort(rows[np.count_nonzero(self._members[:, rows], axis=0) == 1])

    def _free(self, count: int) -> IntArray:
        """The lowest rows that nobody owns."""
        free: IntArray = (self._positions == EMPTY).nonzero()[0][:count]
        if free.size < count:
            raise CapacityError(
                f"{count} rows are wanted and {free.size} of {self._positions.size} are free; "
                "clear a sequence or export with a larger context"
            )
        return free

    def _take(self, reservation: Reservation, places: IntArray) -> None:
        rows = reservation.rows
        self._positions[rows], self._places[rows] = reservation.positions, places
        self._orders[rows] = np.arange(self._next_order, self._next_order + rows.size)
        self._members[reservation.sequences, rows] = True

    def _extend(self, sequence: int, rows: IntArray) -> None:
        """Append rows to a sequence's list, whose room doubles."""
        count, held = self._counts[sequence], self._rows[sequence]
        if count + rows.size > held.size:
            room = np.empty(max(64, 2 * (count + rows.size)), np.int64)
            room[:count] = held[:count]
            self._rows[sequence] = held = room
        held[count : count + rows.size] = rows
        self._counts[sequence] = count + rows.size
