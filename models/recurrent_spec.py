"""Rows of recurrent and convolution states, and the plan inputs that address them.

One plan serves every recurrent layer. A row holds the state of one sequence after so many tokens;
lengths are counted in tokens, never in positions, which may repeat. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from cachegraph.models.buckets import Bucket
from cachegraph.models.contract import CacheKind, Padding, Planner, RowLayout, TensorRow
from cachegraph.models.errors import ConfigError
from cachegraph.models.plan_fields import PlanInput, plan_rows

V = TypeVar("V")

MAX_SNAPSHOTS = 8
START = "start_state"  # the sentinel row: the state of a sequence without tokens, all 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentSpec:
    """States of all sequences. snapshots: earlier states kept for rewinding, 0 to 8."""

    snapshots: int

    def __post_init__(self) -> None:
        if not 0 <= self.snapshots <= MAX_SNAPSHOTS:
            raise ConfigError(
                f"{self.snapshots} snapshots of recurrent states; 0 to {MAX_SNAPSHOTS} are kept"
            )

    @property
    def rows(self) -> int:
        """Rows of one sequence: its state, and one for each snapshot."""
        return 1 + self.snapshots

    def row(self, sequence: int, length: int) -> int:
        """The row of a sequence's state after `length` tokens."""
        return sequence * self.rows + length % self.rows

    def layout(self, sequences: int, bucket: Bucket) -> RowLayout:
        """Rows of a cache: the sequences', the start state, spare ones for the largest bucket."""
        return RowLayout(
            rows_per_stream=self.rows,
            streams=sequences,
            sentinels=(START,),
            spare_rows=bucket.streams * self.kept(bucket.step),
        )

    def kept(self, step: int) -> int:
        """States of one sequence that a step of so many tokens writes: those of its last ones."""
        return min(step, self.rows)


class RecurrentFields(NamedTuple, Generic[V]):
    """The plan inputs of recurrent states, in graph order."""

    state_read_idxs: V
    state_write_src_idxs: V
    state_write_dst_idxs: V
    n_tokens: V


def recurrent_rows(kind: CacheKind) -> tuple[TensorRow, ...]:
    """The contract rows of recurrent states. kind: one of the caches, which are laid out alike."""
    inputs = RecurrentFields(
        state_read_idxs=PlanInput(
            ("S",), Padding.SENTINEL, "row of the state that each stream starts from", kind
        ),
        state_write_src_idxs=PlanInput(
            ("S", "KR"), Padding.LAST, "tokens of T after which states are kept"
        ),
        state_write_dst_idxs=PlanInput(
            ("S", "KR"), Padding.SPARE, "rows that take them", kind
        ),
        n_tokens=PlanInput(
            ("S",), Padding.ZERO, "tokens of each stream; later ones change no state"
        ),
    )
    return plan_rows(Planner.RECURRENT, recurrent_name, inputs._fields, inputs)


def recurrent_name(field: str) -> str:
    """Graph name of a plan input."""
    return f"plan.recurrent.{field}"
