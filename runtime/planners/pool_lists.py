"""The pools of all sequences as flat lists, which is how other runtimes take them.

A graph of ours takes the pools of each stream apart, straight from the layouts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from cachegraph.models.pooled_spec import PooledSpec
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.planners.pool_layout import PoolCells
from cachegraph.runtime.planners.pooled import PooledPlan


class PoolLists(NamedTuple):
    """The m pools of all sequences, sequence after sequence.

    pool_cells: [m] row that holds each pool's key. pool_idxs: [m, k] members, counted from the
    start of their stream; the plan's sentinel for sequences of other streams than the step's.
    """

    pool_cells: IntArray
    pool_idxs: IntArray


def pool_lists(
    spec: PooledSpec, cells: PoolCells, plan: PooledPlan, present: Collection[int]
) -> PoolLists:
    """The lists of a plan. present: the sequences of the step."""
    reps, members = [], []
    for sequence, layout in plan.layouts.items():
        rows = layout.members(spec.pool)
        if not cells.is_unified:
            is_here = sequence in present
            rows = (
                rows % cells.cells_per_stream if is_here else np.full_like(rows, plan.sentinel)
            )
        reps.append(layout.reps)
        members.append(rows)
    if not reps:
        return PoolLists(np.zeros(0, np.int64), np.zeros((0, spec.pool), np.int64))
    return PoolLists(np.concatenate(reps), np.concatenate(members))
