"""Names of the plan inputs and of the sentinel rows, shared by every family.

A family's contract gives them shapes and padding rules; the builder and the planners address them
by the fields of these tuples, so that no tensor name is typed twice.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from cachegraph.models.contract import CacheKind

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
