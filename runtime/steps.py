"""Runs a batch that was checked and split: each ubatch is planned, padded, run and committed alone.

Planning is pure and committing comes last, so a step that was refused leaves no trace. Knows
nothing of locks, of text, nor of what else an engine remembers: it is told by `committed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.buckets import Bucket
from cachegraph.models.errors import CachegraphError, CapacityError, StepError
from cachegraph.models.manifest import Manifest
from cachegraph.runtime.batch import Batch, IntArray
from cachegraph.runtime.binding import BoundCall
from cachegraph.runtime.interrupts import interrupts_held
from cachegraph.runtime.part import GraphPart
from cachegraph.runtime.planners.step import StepPlan, pick_bucket
from cachegraph.runtime.sequence_memory import SequenceMemory
from cachegraph.runtime.split import UBatch
from cachegraph.runtime.stages import StageChain

Progress = Callable[[int, int], None]
Rows = NDArray[np.float32]


class StepRunner:
    """Steps of one bundle. committed: called with each ubatch that is in, and with its call."""

    def __init__(
        self,
        manifest: Manifest,
        graph: GraphPart | StageChain,
        table: SequenceMemory,
        committed: Callable[[UBatch, BoundCall], None],
    ) -> None:
        self._manifest = manifest
        self._graph = graph
        self._table = table
        self._committed = committed

    def run(
        self,
        batch: Batch,
        ubatches: Sequence[UBatch],
        result: str,
        progress: Progress | None = None,
    ) -> Rows:
        """Run all ubatches; the rows of a result that the batch wants, in its order: [n, width].

        Raises as `Engine.decode`.
        """
        row_of = np.cumsum(batch.wants_logits) - 1  # row in the result of each wanted token
        width = self._graph.contract[result].shape[-1]
        rows = np.empty((int(batch.wants_logits.sum()), int(width)), np.float32)
        done = 0
        for ubatch in ubatches:
            with interrupts_held():
                wanted, values = self._step(ubatch, done, result)
            rows[row_of[ubatch.source[wanted]]] = values
            done += ubatch.tokens.size
            if progress is not None:
                progress(done, batch.tokens.size)
        return rows

    def _step(self, ubatch: UBatch, done: int, result: str) -> tuple[IntArray, Rows]:
        """Plan, pad, run and commit one ubatch; entries that want a row, and their rows."""
        plan = self._table.plan(ubatch)
        bucket = pick_bucket(self._manifest.planners, self._manifest.ladder, plan)
        call = self._prepared(bucket, plan, done)
        try:
            self._graph.run(call)
        except Exception as error:
            raise self._dropped(ubatch, done, error) from error
        self._table.commit(plan)
        self._committed(ubatch, call)
        wanted = plan.wanted_rows
        if not wanted.size:  # nothing to bring back from the device
            width = call.results[result].array.shape[-1]
            return wanted, np.empty((0, width), np.float32)
        return wanted, self._graph.result(call, result)[: wanted.size]

    def _prepared(self, bucket: Bucket, plan: StepPlan, done: int) -> BoundCall:
        try:
            return self._graph.prepare(bucket, plan)
        except CapacityError as error:
            raise CapacityError(f"{error}; {done} tokens of the batch are in") from error

    def _dropped(self, ubatch: UBatch, done: int, error: Exception) -> CachegraphError:
        """The graph may have written state rows of these sequences: they are forgotten."""
        for seq in ubatch.streams:
            self._table.clear(seq)
        kept = {s: n for s in self._table.ids if (n := self._table.length(s))}
        lengths = ", ".join(f"{s}: {n}" for s, n in kept.items()) or "none"
        return StepError(
            f"a graph call failed after {done} tokens of the batch were in; sequences "
            f"{list(ubatch.streams)} were dropped, tokens held by the others: {lengths}; "
            f"ONNX Runtime says: {(str(error).splitlines() or [repr(error)])[0]}"
        )
