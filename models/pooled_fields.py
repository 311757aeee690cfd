"""Names, shapes and padding of the plan inputs of pooled keys, by the fields of one tuple.

The builder and the planner address the inputs through it, so that no tensor name is typed twice.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from cachegraph.models.contract import CacheKind, Padding, Planner, TensorRow
from cachegraph.models.plan_fields import PlanInput, plan_rows
from cachegraph.models.pooled_spec import PooledSpec

V = TypeVar("V")

PREFIX = "plan.pool"


class PooledFields(NamedTuple, Generic[V]):
    """The plan inputs of the pooled index, in graph order."""

    k_idxs: V
    pool_cells: V
    pool_idxs: V
    n_visible: V
    tail_idxs: V
    n_tail: V
    new_pool_idxs: V
    new_pool_rep: V
    new_pool_pos: V


def pooled_inputs(spec: PooledSpec) -> PooledFields[PlanInput]:
    """The plan inputs of a pooled index. Rows are those of the whole cache."""
    members = spec.pool
    return PooledFields(
        k_idxs=PlanInput(("T",), Padding.SPARE, "row that takes each token", CacheKind.KEYS),
        pool_cells=PlanInput(
            ("S", "NG"), Padding.LAST, "row that holds the key of each of a stream's pools"
        ),
        pool_idxs=PlanInput(
            ("S", "MG"), Padding.LAST, f"rows of the {members} members of each pool in turn"
        ),
        n_visible=PlanInput(("T",), Padding.ZERO, "pools of its stream that each token sees"),
        tail_idxs=PlanInput(
            ("T", spec.pool - 1),
            Padding.LAST,
            "rows after each token's last complete pool, newest first",
        ),
        n_tail=PlanInput(("T",), Padding.ZERO, "rows of the tail; later ones are masked"),
        new_pool_idxs=PlanInput(
            ("BG", members), Padding.LAST, "rows of the members of each pool made anew"
        ),
        new_pool_rep=PlanInput(
            ("BG",), Padding.SPARE, "row that takes its key", CacheKind.POOLED
        ),
        new_pool_pos=PlanInput(
            ("BG", 3), Padding.ZERO, "positions t, y and x of its first member"
        ),
    )


def pooled_name(field: str) -> str:
    """Graph name of a plan input."""
    return f"{PREFIX}.{field}"


def pooled_rows(spec: PooledSpec) -> tuple[TensorRow, ...]:
    """The contract rows of a pooled index."""
    inputs = pooled_inputs(spec)
    return plan_rows(Planner.POOLED, pooled_name, inputs._fields, inputs)
