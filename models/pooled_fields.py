"""Names and meanings of the plan inputs of pooled keys, by the fields of one tuple.

The builder and the planner address the inputs through it, so that no tensor name is typed twice.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from cachegraph.models.contract import Dim, Padding

V = TypeVar("V")

PREFIX = "plan.pool"


class PooledFields(NamedTuple, Generic[V]):
    """The plan inputs of the pooled index, in graph order."""

    k_idxs: V
    pool_cells: V
    pool_idxs: V
    mask_start: V
    mask_n: V
    tail_idxs: V
    new_pool_idxs: V
    new_pool_rep: V
    new_pool_pos: V


class PlanInput(NamedTuple):
    """One plan input but for its name: shape, padding and meaning."""

    shape: tuple[Dim, ...]
    padding: Padding
    meaning: str


POOLED_INPUTS = PooledFields[PlanInput](
    k_idxs=PlanInput(("T",), Padding.SPARE, "row that takes each token"),
    pool_cells=PlanInput(("NG",), Padding.LAST, "row that holds the key of each pool"),
    pool_idxs=PlanInput(
        ("NG", "G"),
        Padding.SENTINEL,
        "members of each pool, counted from the start of their stream; the sentinel, which is the "
        "number of cells of a stream, stands for none",
    ),
    mask_start=PlanInput(("T",), Padding.ZERO, "first pool that each token sees"),
    mask_n=PlanInput(("T",), Padding.ZERO, "pools that each token sees"),
    tail_idxs=PlanInput(
        ("T", "L"),
        Padding.SENTINEL,
        "rows after each token's last complete pool, newest first, counted from the start of its "
        "stream",
    ),
    new_pool_idxs=PlanInput(
        ("BG", "G"), Padding.LAST, "rows of the members of each pool made anew"
    ),
    new_pool_rep=PlanInput(("BG",), Padding.SPARE, "row that takes its key"),
    new_pool_pos=PlanInput(
        ("BG", 3), Padding.ZERO, "positions t, y and x of its first member"
    ),
)


def pooled_name(field: str) -> str:
    """Graph name of a plan input."""
    return f"{PREFIX}.{field}"
