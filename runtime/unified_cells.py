"""The cell table of a `unified` raw cache: one pool of cells, each of any number of sequences.

A sequence has as many slots as a stream of a `per_stream` cache has rows, in the same order, and
each slot holds a cell or none. A copy shares cells; a position that is written takes over the cell
of its slot where no other sequence uses it, and a free one where one does. There are as many cells
as slots, so that a free one is always there: whoever shares a cell leaves another unused. Cells of
positions that were taken back stay with their slot until another position takes it, so that a
checkpoint can move forward again.
"""

from __future__ import annotations

from typing import Self

import numpy as np

from cachegraph.models.contract import RowLayout, RowSharing
from cachegraph.models.planner_specs import RawSpec
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.cells import EMPTY, CellTable, CellView, Reservation

_NONE = -1


def cell_table(layout: RowLayout, raw: RawSpec) -> CellTable:
    """The table that a raw cache's layout asks for."""
    unified = layout.sharing is RowSharing.UNIFIED
    return UnifiedCells(layout, raw) if unified else CellTable(layout, raw)


class UnifiedCells(CellTable):
    """Cells of one pool.

    A cell behind the last stands for the one that a slot lacks: it has number -1, no position and
    no owner.
    """

    def __init__(self, layout: RowLayout, raw: RawSpec) -> None:
        super().__init__(layout, raw)
        cells = layout.live_rows + 1
        self._positions = np.full(cells, EMPTY, np.int64)
        self._members = np.zeros((layout.streams, cells), np.bool_)
        self._slots = np.full((layout.streams, layout.rows_per_stream), _NONE, np.int64)
        self._users = np.zeros(cells, np.int64)  # slots that hold each cell

    def after(self, reservation: Reservation) -> CellView:
        """The table as it would be after `commit`, as a copy."""
        trial = self._trial()
        trial.commit(reservation)
        return CellView(positions=trial._positions[:_NONE], members=trial._members[:, :_NONE])

    def commit(self, reservation: Reservation) -> None:
        """Take the reserved cells."""
        self._hand_over(reservation)
        super().commit(reservation)

    def clear(self, sequence: int) -> None:
        """Forget a sequence; cells that only it used become free."""
        self._users[self._slots[sequence]] -= 1
        self._slots[sequence] = _NONE
        super().clear(sequence)

    def place(self, sequence: int, first: int, end: int) -> None:
        """Give a sequence cells for positions `first` to `end` - 1, where it then ends.

        Slots that hold the cells of these positions keep them.
        """
        positions = np.arange(first, end)
        held = self.rows_of(sequence, positions)
        empty = held == _NONE
        self._hand_over(
            Reservation(
                rows=self._writable(held[empty]),
                positions=positions[empty],
                sequences=np.full(int(empty.sum()), sequence),
            )
        )
        super().place(sequence, first, end)

    def rows_of(self, sequence: int | IntArray, positions: IntArray) -> IntArray:
        """The cells of positions of a sequence, or of a sequence each; -1 where there is none."""
        cells: IntArray = self._slots[sequence, self._offsets(positions)]
        return cells

    def own_rows(self, sequence: int) -> IntArray:
        """Cells that no other sequence uses, ascending."""
        held = self._slots[sequence][self._slots[sequence] != _NONE]
        return np.sort(held[self._users[held] == 1])

    def moves(self, source: int, target: int) -> tuple[IntArray, IntArray]:
        """No rows: a copy shares its cells."""
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def copy(self, source: int, target: int) -> None:
        """Give `target`, which holds nothing, the cells of all that `source` holds."""
        slots = self._slots[source]
        self._slots[target] = np.where(self._members[source, slots], slots, _NONE)
        self._users[self._slots[target]] += 1
        self._members[target] = self._members[source]
        self._ends[target] = self._ends[source]

    def _trial(self) -> Self:
        trial = super()._trial()
        trial._slots, trial._users = self._slots.copy(), self._users.copy()
        return trial

    def _writable(self, rows: IntArray) -> IntArray:
        """Cells that nobody else uses: of slots that leave a shared one, the last keeps it."""
        users = self._users
        shared = ((rows == _NONE) | (users[rows] > 1)).nonzero()[0]
        if not shared.size:
            return rows
        cells, left = rows.copy(), users.copy()
        free = iter((users[:_NONE] == 0).nonzero()[0].tolist())
        for entry in shared.tolist():
            cell = rows[entry]
            if cell == _NONE or left[cell] > 1:
                left[cell] -= 1
                cells[entry] = next(free)
        return cells

    def _rows(self, sequence: int, span: slice) -> IntArray:
        cells: IntArray = self._slots[sequence, span]
        return cells

    def _forget(self, rows: slice | IntArray) -> None:
        numbers = np.arange(self._positions.size)[rows]
        self._positions[numbers[~self._members[:, numbers].any(axis=0)]] = EMPTY

    def _hand_over(self, reservation: Reservation) -> None:
        """Give slots their reserved cells; those that they leave may become free."""
        where = reservation.sequences, self._offsets(reservation.positions)
        left = self._slots[where]
        self._members[reservation.sequences, left] = False
        self._forget(left)
        np.subtract.at(self._users, left, 1)
        self._slots[where] = reservation.rows
        np.add.at(self._users, reservation.rows, 1)
