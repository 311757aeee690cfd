"""Names of the plan inputs and of the sentinel rows, shared by every family.

A family's contract gives them shapes and padding rules; the builder and the planners address them
by the fields of these tuples, so that no tensor name is typed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from cachegraph.models.contract import (
    CacheKind,
    Dim,
    DType,
    Padding,
    Planner,
    Role,
    TensorRow,
)

NO_PREVIOUS = "no_previous_window"
PADDED_BLOCK = "padded_block"
SENTINELS = {
    NO_PREVIOUS: "first half (kv) 0, second half (score) -inf: a softmax weight of 0",
    PADDED_BLOCK: "all 0: the softmax of a padded block stays finite",
}

V = TypeVar("V")


class RawFields(NamedTuple, Generic[V]):
    """The plan inputs of the raw caches, in graph order."""

    write_idxs: V
    read_idxs: V
    read_pos: V
    read_counts: V


class CompressorFields(NamedTuple, Generic[V]):
    """The plan inputs of one compressor, in graph order."""

    state_pos: V
    state_old_idxs: V
    state_read_idxs: V
    state_persist_src_idxs: V
    state_persist_dst_idxs: V
    state_write_idxs: V
    state_write_pos: V
    n_visible: V
    rows: V


def plan_name(kind: CacheKind, field: str) -> str:
    """Graph name of a plan input."""
    return f"plan.{kind.value}.{field}"


class PlanInput(NamedTuple):
    """One plan input but for its name: shape, padding, meaning, and whose spare rows it means."""

    shape: tuple[Dim, ...]
    padding: Padding
    meaning: str
    spare_of: CacheKind | None = None


def plan_rows(
    planner: Planner,
    name: Callable[[str], str],
    fields: Iterable[str],
    inputs: Iterable[PlanInput],
) -> tuple[TensorRow, ...]:
    """Contract rows of plan inputs, in the order of their fields. name: of a field."""
    return tuple(
        TensorRow(
            name=name(field),
            dtype=DType.INT64,
            shape=plan.shape,
            role=Role.PLAN,
            planner=planner,
            padding=plan.padding,
            spare_of=plan.spare_of,
            meaning=plan.meaning,
        )
        for field, plan in zip(fields, inputs, strict=True)
    )
