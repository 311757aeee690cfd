"""The plan of recurrent states: which state each sequence starts from, which ones are kept.

A state is addressed by (sequence, tokens it has seen), never by a batch row, so that what an
earlier step kept is found whatever that step was. Pure; knows nothing of padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cachegraph.models.errors import RewindError
from cachegraph.models.recurrent_spec import RecurrentSpec
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.planners.checks import distinct, fail, in_range, same

NAME = "recurrent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where the states of one sequence stand: after `length` tokens, and `depth` fewer at most."""

    length: int = 0
    depth: int = 0

    def reaches(self, length: int) -> bool:
        """Whether there is a state after so many tokens; there always is one after none."""
        return length == 0 or self.length - self.depth <= length <= self.length

    def after(self, step: int, snapshots: int) -> Standing:
        """The standing after `step` more tokens."""
        return Standing(length=self.length + step, depth=min(self.depth + step, snapshots))

    def rewound(self, length: int) -> Standing:
        """The standing after the tokens from `length` on are taken back.

        RewindError names what can be reached.
        """
        if not self.reaches(length):
            raise RewindError(
                f"the recurrent states cannot stand after {length} tokens; there are states after "
                f"0 and after {self.length - self.depth} to {self.length}; restore a checkpoint"
            )
        return Standing(length=length, depth=max(0, self.depth - (self.length - length)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentPlan:
    """Logical lists for S streams of P tokens, w states kept of each.

    state_read_idxs: [S] row of the state to start from, `start` for a sequence without tokens.
    state_write_src_idxs: [S, w] tokens of T after which states are kept. state_write_dst_idxs:
    [S, w] rows that take them. n_tokens: [S]. standings: those of the streams after success.
    """

    state_read_idxs: IntArray
    state_write_src_idxs: IntArray
    state_write_dst_idxs: IntArray
    n_tokens: IntArray
    standings: Mapping[int, Standing]


def plan_recurrent(
    spec: RecurrentSpec,
    *,
    streams: Sequence[int],
    step: int,
    standings: Mapping[int, Standing],
    start: int,
) -> RecurrentPlan:
    """Plan one step; changes nothing.

    streams: sequence ids, each with `step` tokens, stream-major. standings: a sequence not named
    has no tokens. start: the row of the start state.
    """
    before = {seq: standings.get(seq, Standing()) for seq in streams}
    reads = [
        spec.row(s, stand.length) if stand.length else start for s, stand in before.items()
    ]
    kept = np.arange(step - spec.kept(step), step)
    lengths = np.array([stand.length for stand in before.values()], np.int64)
    ids = np.array(streams, np.int64)
    after = lengths[:, None] + kept + 1
    return RecurrentPlan(
        state_read_idxs=np.array(reads, np.int64),
        state_write_src_idxs=np.arange(ids.size)[:, None] * step + kept,
        state_write_dst_idxs=ids[:, None] * spec.rows + after % spec.rows,
        n_tokens=np.full(ids.size, step),
        standings={s: stand.after(step, spec.snapshots) for s, stand in before.items()},
    )


def validate_recurrent(
    spec: RecurrentSpec,
    plan: RecurrentPlan,
    *,
    streams: Sequence[int],
    sequences: int,
    start: int,
) -> None:
    """PlanError unless every state read and kept is its own stream's, each row written once."""
    count, tokens = len(streams), int(plan.n_tokens.sum())
    for field in ("state_read_idxs", "n_tokens"):
        same(NAME, field, getattr(plan, field).size, count)
    writes = plan.state_write_dst_idxs
    same(NAME, "state_write_src_idxs", plan.state_write_src_idxs.size, writes.size)
    in_range(NAME, "state_write_src_idxs", plan.state_write_src_idxs.ravel(), tokens)
    in_range(NAME, "state_write_dst_idxs", writes.ravel(), sequences * spec.rows)
    distinct(NAME, "state_write_dst_idxs", writes.ravel())
    for at, seq in enumerate(streams):
        read = int(plan.state_read_idxs[at])
        if read != start and read // spec.rows != seq:
            fail(NAME, "state_read_idxs", at, f"row {read} is not of sequence {seq}")
        if (writes[at] // spec.rows != seq).any():
            fail(NAME, "state_write_dst_idxs", at, f"{writes[at]} are not of sequence {seq}")
