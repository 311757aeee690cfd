"""Cells of a recorded pooled scenario: the originals' bookkeeping, played back.

Which cells a batch takes is recorded, so that nothing is searched for. Knows nothing of pools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cachegraph.runtime.batch import BoolArray, IntArray, SeqIds
from cachegraph.runtime.planners.pool_layout import PoolCells

EMPTY = -1
_END = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One ubatch: positions [n], places y and x [n, 2], ids and recorded cells of each token.

    cells: [stream of the ubatch][token], None where the record has none.
    """

    positions: IntArray
    places: IntArray
    ids: SeqIds
    cells: list[list[int]] | None

    @property
    def owners(self) -> SeqIds:
        """The distinct ids of each token, in the order given."""
        return tuple(tuple(dict.fromkeys(ids)) for ids in self.ids)

    @property
    def sequences(self) -> list[int]:
        """Distinct ids by first appearance."""
        return list(dict.fromkeys(seq for ids in self.ids for seq in ids))


def parse_parts(op: Mapping[str, Any], step: Mapping[str, Any]) -> list[Part]:
    """The ubatches of a batch, with their recorded cells: none from where the record ends."""
    recorded = step.get("ub", [])
    return [
        _part(part, recorded[at]["sinfo"]["idxs"] if at < len(recorded) else None)
        for at, part in enumerate(op["ubatches"])
    ]


def _part(given: Mapping[str, Any], cells: list[list[int]] | None) -> Part:
    positions = np.array(given["pos"], np.int64)
    none = [0] * positions.size
    columns = [np.array(given.get(axis, none), np.int64) for axis in ("y", "x")]
    return Part(
        positions=positions,
        places=np.stack(columns, axis=1),
        ids=tuple(tuple(ids) for count, ids in given["seq"] for _ in range(count)),
        cells=cells,
    )


class Cells:
    """The table of one scenario; row = stream * size + cell."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.size: int = given["kv_size"]
        self.is_unified: bool = given["unified"]
        self.sequences: int = max(1, given["n_seq_max"])
        rows = self.size * (1 if self.is_unified else self.sequences)
        self.positions = np.full(rows, EMPTY, np.int64)
        self.places = np.zeros((rows, 2), np.int64)
        self.orders = np.zeros(rows, np.int64)
        self.members = np.zeros((self.sequences, rows), np.bool_)
        self._inserted = 0

    def view(self) -> PoolCells:
        """The table as the planner takes it; a moved cell keeps its y and x."""
        return PoolCells(
            positions=self.positions,
            members=self.members,
            orders=self.orders,
            places=np.column_stack((self.positions, self.places)),
            is_unified=self.is_unified,
            cells_per_stream=self.size,
        )

    def stream(self, sequence: int) -> int:
        """The stream of a sequence."""
        return 0 if self.is_unified else sequence

    def firsts(self) -> dict[int, int]:
        """The first position of every sequence that holds cells."""
        return {
            seq: int(self.positions[mine].min())
            for seq, mine in enumerate(self.members)
            if mine.any()
        }

    def streams(self, part: Part) -> list[int]:
        """The streams of a ubatch, in its order."""
        return list(dict.fromkeys(self.stream(seq) for seq in part.sequences))

    def rows(self, part: Part) -> IntArray:
        """The row of each token: recorded cells are stream by stream, as the tokens are."""
        assert part.cells is not None
        listed = zip(self.streams(part), part.cells, strict=True)
        return np.array([stream * self.size + i for stream, cells in listed for i in cells])

    def has_room(self, parts: list[Part]) -> bool:
        """Whether every token of a batch finds a free cell in its stream."""
        free = (self.positions == EMPTY).reshape(-1, self.size).sum(axis=1)
        for part in parts:
            for ids in part.ids:
                free[self.stream(ids[0])] -= 1
        return bool((free >= 0).all())

    def place(self, part: Part) -> None:
        """Fill the recorded cells of a ubatch."""
        rows = self.rows(part)
        self.positions[rows] = part.positions
        self.places[rows] = part.places
        self.orders[rows] = self._inserted + np.arange(rows.size)
        self._inserted += rows.size
        for row, owners in zip(rows.tolist(), part.owners, strict=True):
            self.members[list(owners), row] = True

    def touched(self, sequence: int, start: int, end: int) -> BoolArray:
        """Rows of a sequence with positions from `start` to `end` - 1; -1 stands for no bound."""
        stop = _END if end < 0 else end
        inside = (self.positions >= max(start, 0)) & (self.positions < stop)
        found: BoolArray = inside & self.members[sequence]
        return found

    def remove(self, sequence: int, start: int, end: int) -> None:
        """Take positions from one sequence, or with -1 from all."""
        for seq in range(self.sequences) if sequence < 0 else (sequence,):
            self.members[seq, self.touched(seq, start, end)] = False
        self._free()

    def copy(self, source: int, target: int) -> None:
        """Give the target every cell of the source: the same ones, or the same of its stream."""
        mine = self.members[source].nonzero()[0]
        if self.stream(source) == self.stream(target):
            self.members[target, mine] = True
            return
        self.members[target] = False
        self._free()
        rows = mine + (self.stream(target) - self.stream(source)) * self.size
        for column in (self.positions, self.places, self.orders):
            column[rows] = column[mine]
        self.members[target, rows] = True

    def keep(self, sequence: int) -> None:
        """Drop all other sequences of the sequence's stream."""
        for seq in range(self.sequences):
            if seq != sequence and self.stream(seq) == self.stream(sequence):
                self.members[seq] = False
        self._free()

    def move(
        self, sequence: int, start: int, end: int, moved: Callable[[IntArray], IntArray]
    ) -> None:
        """Change the positions of a sequence's cells; those that become negative are dropped."""
        rows = self.touched(sequence, start, end)
        self.positions[rows] = moved(self.positions[rows])
        self.members[:, rows & (self.positions < 0)] = False
        self._free()

    def clear(self) -> None:
        """Drop everything."""
        self.members[:] = False
        self._free()

    def _free(self) -> None:
        self.positions[~self.members.any(axis=0)] = EMPTY
