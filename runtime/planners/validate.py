"""Validation of logical plans, before they are padded and before any graph runs.

A PlanError names planner, field, position and bound. Judges plans; makes none.
"""

from __future__ import annotations

import numpy as np

from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.cells import CellView
from cachegraph.runtime.planners.checks import distinct, fail, in_range, same
from cachegraph.runtime.planners.compressor import (
    CompressorPlan,
    CompressorSizes,
    PlanTokens,
)
from cachegraph.runtime.planners.raw import RawPlan


def validate_tokens(tokens: PlanTokens) -> None:
    """PlanError unless each sequence's positions are distinct and not negative.

    What planners rely on. A batch that passed the checker fulfils it.
    """
    positions = tokens.positions
    if positions.size and positions.min() < 0:
        at = int(positions.argmin())
        fail("every", "positions", at, f"{positions[at]} is negative")
    seen: dict[tuple[int, int], int] = {}
    for place, token in zip(
        zip(tokens.owner_streams.tolist(), tokens.owner_positions.tolist(), strict=True),
        tokens.owner_tokens.tolist(),
        strict=True,
    ):
        if seen.setdefault(place, token) != token:
            fail("every", "positions", token, f"{place[1]} is repeated in sequence {place[0]}")


def validate_raw(
    plan: RawPlan, cells: CellView, positions: IntArray | None, *, num_rows: int
) -> None:
    """PlanError unless rows are in range, write targets unique, counts consistent.

    The cell reserved for each token must hold that token's position, if positions are given.
    """
    in_range("raw", "write_idxs", plan.write_idxs, num_rows)
    in_range("raw", "read_idxs", plan.read_idxs, num_rows)
    same("raw", "read_pos", plan.read_pos.size, plan.read_idxs.size)
    same("raw", "read_counts, summed", int(plan.read_counts.sum()), plan.read_idxs.size)
    distinct("raw", "write_idxs", plan.write_idxs)
    if positions is None:
        return
    same("raw", "write_idxs", plan.write_idxs.size, positions.size)
    if cells.rows is not None:
        held = dict(zip(cells.rows.tolist(), cells.positions.tolist(), strict=True))
        placed = np.array([held.get(row, -1) for row in plan.write_idxs.tolist()], np.int64)
    else:
        placed = cells.positions[plan.write_idxs]
    wrong = placed != positions
    if wrong.any():
        at = int(wrong.argmax())
        fail(
            "raw",
            "write_idxs",
            at,
            f"row {plan.write_idxs[at]} is reserved for position {placed[at]}, "
            f"the token's is {positions[at]}",
        )


def validate_compressor(
    name: str, sizes: CompressorSizes, plan: CompressorPlan, count: int
) -> None:
    """PlanError unless the plan of `count` tokens is whole, in range and writes no row twice."""
    blocks = plan.num_blocks
    for field in ("state_pos", "state_delta_src_idxs", "state_delta_dst_idxs", "n_visible"):
        same(name, field, getattr(plan, field).size, count)
    same(name, "state_write_pos", plan.state_write_pos.size, blocks)
    same(name, "state_read_idxs", plan.state_read_idxs.size, blocks * sizes.window)
    kept = plan.state_persist_dst_idxs
    same(name, "state_persist_src_idxs", plan.state_persist_src_idxs.size, kept.size)
    in_range(name, "state_pos", plan.state_pos, sizes.ratio)
    in_range(name, "state_delta_src_idxs", plan.state_delta_src_idxs, count)
    in_range(name, "state_delta_dst_idxs", plan.state_delta_dst_idxs, sizes.state_rows)
    in_range(name, "state_persist_src_idxs", plan.state_persist_src_idxs, count)
    in_range(name, "state_persist_dst_idxs", kept, sizes.state_rows)
    in_range(name, "n_visible", plan.n_visible, sizes.rows_per_stream + 1)
    distinct(name, "state_persist_dst_idxs", kept)
    if blocks:
        sentinel = 1 if sizes.overlap else 0
        in_range(
            name, "state_read_idxs", plan.state_read_idxs, sizes.state_rows + count + sentinel
        )
        in_range(
            name,
            "state_write_idxs",
            plan.state_write_idxs,
            sizes.rows_per_stream * sizes.streams,
        )
        in_range(
            name, "state_write_pos", plan.state_write_pos, sizes.rows_per_stream * sizes.ratio
        )
        distinct(name, "state_write_idxs", plan.state_write_idxs)
    if not 0 < plan.num_exposed <= sizes.rows_per_stream:
        fail(name, "rows", 0, f"{plan.num_exposed} rows exposed of {sizes.rows_per_stream}")
