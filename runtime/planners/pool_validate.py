"""Validation of the tokens and plans of pooled keys, before they are padded and any graph runs.

A PlanError names planner, field, position and bound. Judges; makes no plan.
"""

from __future__ import annotations

import numpy as np

from cachegraph.models.pooled_spec import PooledSpec
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.planners.checks import distinct, fail, in_range, same
from cachegraph.runtime.planners.pool_layout import PoolCells
from cachegraph.runtime.planners.pooled import PooledPlan, PoolTokens

NAME = "pool"


def validate_pool_tokens(cells: PoolCells, tokens: PoolTokens) -> None:
    """PlanError unless each token has a cell of its own that holds its position and owners.

    What the planner relies on.
    """
    count = tokens.rows.size
    num_rows = cells.positions.size
    same(NAME, "positions", tokens.positions.size, count)
    same(NAME, "owners", len(tokens.owners), count)
    in_range(NAME, "k_idxs", tokens.rows, num_rows)
    distinct(NAME, "k_idxs", tokens.rows)
    _check_owners(cells, tokens)
    held = cells.positions[tokens.rows]
    wrong = (held != tokens.positions) | (tokens.positions < 0)
    if wrong.any():
        at = int(wrong.argmax())
        fail(
            NAME,
            "k_idxs",
            at,
            f"row {tokens.rows[at]} is reserved for position {held[at]}, the token's is "
            f"{tokens.positions[at]}",
        )


def _check_owners(cells: PoolCells, tokens: PoolTokens) -> None:
    num_sequences = cells.members.shape[0]
    for at, (row, owners) in enumerate(zip(tokens.rows.tolist(), tokens.owners, strict=True)):
        if not owners or not all(0 <= seq < num_sequences for seq in owners):
            fail(NAME, "owners", at, f"{owners} is not among the {num_sequences} sequences")
        if len(owners) > 1 and not cells.is_unified:
            fail(NAME, "owners", at, f"{owners} share a token, but their streams are separate")
        if not cells.members[list(owners), row].all():
            fail(NAME, "owners", at, f"row {row} does not belong to every one of {owners}")
        if row // cells.cells_per_stream != cells.stream(owners[0]):
            fail(NAME, "k_idxs", at, f"row {row} is not of the stream of sequence {owners[0]}")


def validate_pooled(
    spec: PooledSpec, cells: PoolCells, tokens: PoolTokens, plan: PooledPlan
) -> None:
    """PlanError unless the plan is whole, in range, coherent, and writes no row twice."""
    count, pools, size = tokens.rows.size, plan.num_pools, spec.pool
    num_rows, sentinel = cells.positions.size, cells.cells_per_stream
    for field in ("k_idxs", "mask_start", "mask_n"):
        same(NAME, field, getattr(plan, field).size, count)
    same(NAME, "tail_idxs", plan.tail_idxs.size, count * (size - 1))
    same(NAME, "new_pool_idxs", plan.new_pool_idxs.size, plan.new_pools.size * size)
    same(NAME, "new_pool_pos", plan.new_pool_pos.size, plan.new_pools.size * 3)
    in_range(NAME, "tail_idxs", plan.tail_idxs.ravel(), sentinel + 1)
    in_range(NAME, "mask_n", plan.mask_n, pools + 1)
    in_range(NAME, "mask_start", plan.mask_start + plan.mask_n, pools + 1)
    in_range(NAME, "new_pool_idxs", plan.new_pool_idxs.ravel(), num_rows)
    in_range(NAME, "new_pool_rep", plan.new_pool_rep, num_rows)
    distinct(NAME, "new_pool_rep", plan.new_pool_rep)
    is_member = (plan.new_pool_idxs == plan.new_pool_rep[:, None]).any(axis=1)
    if not is_member.all():
        at = int((~is_member).argmax())
        fail(NAME, "new_pool_rep", at, f"row {plan.new_pool_rep[at]} is no member of its pool")
    _check_coupled(cells, tokens, plan)


def _check_coupled(cells: PoolCells, tokens: PoolTokens, plan: PooledPlan) -> None:
    """A token of several sequences needs one history in all of them: one mask serves them."""
    if all(len(owners) == 1 for owners in tokens.owners):
        return
    newest: dict[tuple[int, ...], int] = {}
    for at in np.lexsort((cells.orders[tokens.rows], tokens.positions)).tolist():
        if len(tokens.owners[at]) > 1:
            newest[tokens.owners[at]] = at
    for owners, at in newest.items():
        first, *others = (_history(cells, tokens, plan, seq, at) for seq in owners)
        if not all(np.array_equal(first, other) for other in others):
            fail(
                NAME,
                "owners",
                at,
                f"the histories of {owners} differ; decode the token once for each sequence",
            )


def _history(
    cells: PoolCells, tokens: PoolTokens, plan: PooledPlan, sequence: int, at: int
) -> IntArray:
    """Rows of a sequence up to a token of it."""
    layout = plan.layouts[sequence]
    orders = cells.orders[tokens.rows[at : at + 1]]
    rank = int(layout.ranks(tokens.positions[at : at + 1], orders)[0])
    return layout.rows[: rank + 1]
