"""Which row holds the key of each pool that is made anew.

That of its last member; where sequences share rows and another pool's key lies there, the newest
member row that holds none. A pool that several sequences share is made once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from cachegraph.models.errors import PlanError
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.planners.pool_layout import NO_ROW, PoolCells, PoolLayout

_Members = tuple[int, ...]
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Keyed:
    """A layout and the pools whose key is not in the cache, ascending."""

    layout: PoolLayout
    missing: IntArray

    @classmethod
    def of(cls, layout: PoolLayout, reps: IntArray | None = None) -> Keyed:
        """A layout with these rows of keys; None keeps its own."""
        if reps is not None:
            layout = dataclasses.replace(layout, reps=reps)
        return cls(layout=layout, missing=(layout.reps == NO_ROW).nonzero()[0])


def assign_reps(
    keyed: Mapping[int, Keyed], cells: PoolCells, size: int, first: Iterable[int]
) -> tuple[dict[int, PoolLayout], dict[int, IntArray]]:
    """Layouts with a row for every pool's key, and which pools of each sequence are made anew.

    first: sequences whose pools are listed before others' where they are the same. PlanError where
    every member row of a pool holds another pool's key.
    """
    layouts = {sequence: each.layout for sequence, each in keyed.items()}
    made = dict.fromkeys(layouts, _NONE)
    holders: _Holders | None = None
    for sequence in dict.fromkeys([*first, *layouts]):
        if sequence not in keyed or not keyed[sequence].missing.size:
            continue
        layout, missing = layouts[sequence], keyed[sequence].missing
        starts = layout.starts[missing]
        members = layout.rows[starts[:, None] + np.arange(size)]
        reps = members[:, -1].copy()
        is_shared = np.count_nonzero(cells.members[:, members[:, -1]], axis=0) > 1
        is_made = np.ones(missing.size, np.bool_)
        if is_shared.any():
            holders = _Holders(layouts, size) if holders is None else holders
            for at in is_shared.nonzero()[0].tolist():
                row, is_known = holders.take(sequence, tuple(members[at].tolist()))
                reps[at] = row
                is_made[at] = not is_known
        made[sequence] = missing[is_made]
        filled = layout.reps.copy()
        filled[missing] = reps
        layouts[sequence] = dataclasses.replace(layout, reps=filled)
    return layouts, made


class _Holders:
    """Which pool's key each row holds, and those made in this step."""

    def __init__(self, layouts: Mapping[int, PoolLayout], size: int) -> None:
        self._pools: dict[int, _Members] = {}
        self._made: set[int] = set()
        for layout in layouts.values():
            reps = layout.reps.tolist()
            for row, members in zip(reps, layout.members(size).tolist(), strict=True):
                if row != NO_ROW:
                    self._pools[row] = tuple(members)

    def take(self, sequence: int, members: _Members) -> tuple[int, bool]:
        """The row for a pool's key, and whether the step makes that key already."""
        for row in reversed(members):
            held = self._pools.get(row)
            if held is None or held == members:
                self._pools[row] = members
                is_made = row in self._made
                self._made.add(row)
                return row, is_made
        raise PlanError(
            f"pool plan: new_pool_rep: every row of {members}, a pool of sequence {sequence}, "
            "holds another pool's key; give the sequence rows of its own; the graph was not run"
        )
