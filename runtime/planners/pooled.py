"""The plan of pooled keys: pools of every sequence, those to make anew, what each token sees.

Pure: takes the cell table as it will be once the step's tokens are placed, the layouts of the last
step that succeeded and the stale marks. Assumes neither contiguous nor ordered cells. A key is kept
only where the last layout holds the same pool; all others are made anew. Knows nothing of padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cachegraph.models.pooled_spec import PooledSpec
from cachegraph.runtime.batch import IntArray, SeqIds
from cachegraph.runtime.planners.pool_layout import (
    NO_ROW,
    PoolCells,
    PoolLayout,
    build_layout,
    can_grow,
    grouped,
    grow_layout,
)
from cachegraph.runtime.planners.pool_reps import Keyed, assign_reps

Layouts = Mapping[int, PoolLayout]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolTokens:
    """Tokens of a step: rows reserved for them, positions [n] each, and the sequences of each."""

    rows: IntArray
    positions: IntArray
    owners: SeqIds

    def rows_of(self) -> dict[int, IntArray]:
        """Rows that each sequence gets, by order of first appearance."""
        found: dict[int, list[int]] = {}
        for row, owners in zip(self.rows.tolist(), self.owners, strict=True):
            for sequence in owners:
                found.setdefault(sequence, []).append(row)
        return {sequence: np.array(rows, np.int64) for sequence, rows in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledPlan:
    """Logical lists for n tokens and m pools, b of them made anew; the pools are in `layouts`.

    k_idxs: [n] row that takes each token. mask_start, mask_n: [n] the pools that each token sees,
    numbered sequence after sequence. tail_idxs: [n, k - 1] newest tokens up to this one, as many as
    are left when all up to it are cut into groups of k, newest first, counted from the start of
    their stream; `sentinel`, the rows of a stream, for none. new_pools: [b] numbers of the pools
    made anew; new_pool_idxs: [b, k] rows of their members; new_pool_rep: [b] row that takes the
    key, distinct; new_pool_pos: [b, 3] positions t, y and x of the first member. layouts: those of
    all sequences once the step has succeeded.
    """

    k_idxs: IntArray
    mask_start: IntArray
    mask_n: IntArray
    tail_idxs: IntArray
    new_pools: IntArray
    new_pool_idxs: IntArray
    new_pool_rep: IntArray
    new_pool_pos: IntArray
    sentinel: int
    layouts: Layouts

    @property
    def num_pools(self) -> int:
        """Pools of all sequences."""
        return sum(layout.num_pools for layout in self.layouts.values())


def plan_pooled(
    spec: PooledSpec,
    cells: PoolCells,
    tokens: PoolTokens,
    *,
    layouts: Layouts,
    stale: Mapping[int, int],
) -> PooledPlan:
    """Plan one step; changes nothing. The tokens passed `validate_pool_tokens`.

    layouts: `layouts` of the last plan that succeeded. stale: the position from which each marked
    sequence is pooled again, whether it is in the step or not.
    """
    fresh = tokens.rows_of()
    keyed = _layouts(spec, cells, fresh, layouts, stale)
    first = [*sorted(stale), *fresh]
    fixed, made = assign_reps(keyed, cells, spec.pool, first)
    starts = _starts(fixed)
    rows = _joined([fixed[seq].members_of(new, spec.pool) for seq, new in made.items()])
    mask_start, mask_n, tail = _visible(spec, cells, tokens, fixed, starts)
    return PooledPlan(
        k_idxs=tokens.rows,
        mask_start=mask_start,
        mask_n=mask_n,
        tail_idxs=tail,
        new_pools=_joined([starts[seq] + new for seq, new in made.items()]),
        new_pool_idxs=rows.reshape(-1, spec.pool),
        new_pool_rep=_joined([fixed[seq].reps[new] for seq, new in made.items()]),
        new_pool_pos=_places(cells, rows.reshape(-1, spec.pool)[:, 0]),
        sentinel=cells.cells_per_stream,
        layouts=fixed,
    )


def _layouts(
    spec: PooledSpec,
    cells: PoolCells,
    fresh: Mapping[int, IntArray],
    layouts: Layouts,
    stale: Mapping[int, int],
) -> dict[int, Keyed]:
    """The layout of every sequence that has cells, by id, and which keys it lacks."""
    counts = cells.counted()
    none = np.zeros(0, np.int64)
    keyed = {}
    for sequence in (seq for seq, count in enumerate(counts) if count):
        rows, old = fresh.get(sequence, none), layouts.get(sequence)
        if (
            old is not None
            and sequence not in stale
            and old.rows.size + rows.size == counts[sequence]
            and can_grow(old, cells, rows)
        ):
            grown = grow_layout(old, cells, rows, spec.pool, spec.grouping)
            keyed[sequence] = Keyed(
                layout=grown, missing=np.arange(old.num_pools, grown.num_pools)
            )
            continue
        built = build_layout(cells, sequence, spec.pool, spec.grouping)
        if old is None:
            keyed[sequence] = Keyed.of(built)
        else:
            keyed[sequence] = _kept(built, old, spec.pool, stale.get(sequence))
    return keyed


def _kept(built: PoolLayout, old: PoolLayout, size: int, stale: int | None) -> Keyed:
    """A layout built anew, with the keys of those pools that an old one holds alike.

    Alike: the same tokens in the same rows, at the same positions; and not stale.
    """
    known = {int(rank): at for at, rank in enumerate(old.orders[old.starts])}
    reps = np.full(built.num_pools, NO_ROW)
    before = _identity(old, size)
    for at, pool in enumerate(_identity(built, size)):
        place = known.get(int(pool[0, 0]))
        is_stale = stale is not None and built.positions[built.starts[at] + size - 1] >= stale
        if place is not None and not is_stale and np.array_equal(before[place], pool):
            reps[at] = old.reps[place]
    return Keyed.of(built, reps)


def _identity(layout: PoolLayout, size: int) -> IntArray:
    """What a pool's key is made of: insertion number, row and position of each member."""
    parts = (layout.orders, layout.rows, layout.positions)
    return np.stack([grouped(part, layout.starts, size) for part in parts], axis=1)


def _visible(
    spec: PooledSpec,
    cells: PoolCells,
    tokens: PoolTokens,
    layouts: Layouts,
    starts: Mapping[int, int],
) -> tuple[IntArray, IntArray, IntArray]:
    """First pool and number of pools that each token sees, and its tail: its first owner's."""
    count = tokens.rows.size
    mask_start, mask_n = np.zeros(count, np.int64), np.zeros(count, np.int64)
    tail = np.full((count, spec.pool - 1), cells.cells_per_stream)
    leads = np.array([owners[0] for owners in tokens.owners], np.int64)
    back = np.arange(spec.pool - 1)
    for sequence in dict.fromkeys(leads.tolist()):
        layout = layouts[sequence]
        mine = (leads == sequence).nonzero()[0]
        ranks = layout.ranks(tokens.positions[mine], cells.orders[tokens.rows[mine]])
        seen = layout.starts.searchsorted(ranks - (spec.pool - 1), side="right")
        mask_n[mine] = seen
        mask_start[mine] = np.where(seen > 0, starts[sequence], 0)
        is_tail = back < ((ranks + 1) % spec.pool)[:, None]
        rows = layout.rows[np.maximum(ranks[:, None] - back, 0)] - cells.base(sequence)
        tail[mine] = np.where(is_tail, rows, cells.cells_per_stream)
    return mask_start, mask_n, tail


def _starts(layouts: Layouts) -> dict[int, int]:
    """The number of each sequence's first pool."""
    starts, count = {}, 0
    for sequence, layout in layouts.items():
        starts[sequence] = count
        count += layout.num_pools
    return starts


def _places(cells: PoolCells, rows: IntArray) -> IntArray:
    if cells.places is not None:
        return cells.places[rows]
    return np.repeat(cells.positions[rows][:, None], 3, axis=1)


def _joined(parts: list[IntArray]) -> IntArray:
    if not parts:
        return np.zeros(0, np.int64)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
