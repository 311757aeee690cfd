"""One opened graph: its session, its caches bound in place, and the buffers of every bucket used.

Runs what it is given. Knows nothing of sequences, nor of what a plan means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.buckets import Bucket
from cachegraph.models.contract import Contract
from cachegraph.models.errors import CapacityError
from cachegraph.models.ngram_spec import ROWS
from cachegraph.models.planner_specs import PlannerSpecs, dims
from cachegraph.runtime.binding import Binder, BoundCall, Buffer, bind_call
from cachegraph.runtime.ngram_tables import NgramTables
from cachegraph.runtime.padding import Filler, fill_rows
from cachegraph.runtime.planners.step import StepPlan

Rows = NDArray[np.float32]


class GraphPart:
    """A graph that runs any bucket of a bundle through one session.

    calls: the bound buffers of each bucket, made at its first use and kept.
    """

    def __init__(
        self,
        session: Any,
        binder: Binder,
        contract: Contract,
        planners: PlannerSpecs,
        caches: Mapping[str, Buffer],
        results: Collection[str],
        tables: NgramTables | None = None,
    ) -> None:
        """caches: buffers of the contract's caches, by name. results: those that are asked for.

        tables: where the graph takes rows of n-gram tables.
        """
        self.session = session
        self.contract = contract
        self.calls: dict[Bucket, BoundCall] = {}
        self._binder = binder
        self._planners = planners
        self._caches = caches
        self._results = results
        self._filler = Filler(contract, planners)
        self._tables = tables

    def bound(self, bucket: Bucket, given: Mapping[str, Buffer] | None = None) -> BoundCall:
        """The buffers of a bucket; CapacityError where they cannot be had.

        given: buffers of another call to take as inputs, where the bucket is not bound yet.
        """
        if bucket not in self.calls:
            sizes = dims(self._planners, bucket)
            try:
                self.calls[bucket] = bind_call(
                    self.session,
                    self._binder,
                    self.contract,
                    self._caches,
                    sizes,
                    self._results,
                    given,
                )
            except MemoryError as error:
                raise CapacityError(
                    f"no memory for the buffers of bucket {bucket.name}; send fewer tokens at "
                    "once or ask for fewer logits"
                ) from error
        return self.calls[bucket]

    def prepare(
        self, bucket: Bucket, plan: StepPlan, carried: Mapping[str, Rows] | None = None
    ) -> BoundCall:
        """Fill every input of a bucket; PlanError or CapacityError where that fails.

        carried: rows of earlier results by input, float32 [tokens of the ubatch, width].
        """
        call = self.bound(bucket)
        self._filler.fill(call.dims, plan, call.arrays)
        given = dict(carried or {})
        if self._tables is not None:
            assert plan.ngram_ids is not None
            given[ROWS] = self._tables.rows(plan.ngram_ids)
        for name, rows in given.items():
            fill_rows(call.arrays[name], rows, plan.ubatch.step, call.dims["P"])
        for buffer in call.inputs.values():
            self._binder.push(buffer)
        return call

    @property
    def providers(self) -> list[str]:
        """The execution provider that runs."""
        return [str(self.session.get_providers()[0])]

    def close(self) -> None:
        """Free session and buffers."""
        self.calls.clear()
        self.session = self._tables = None

    def run(self, call: BoundCall) -> None:
        """Run what was prepared; whatever ONNX Runtime raises. Caches may then be half written."""
        self.session.run_with_iobinding(call.binding)

    def result(self, call: BoundCall, name: str) -> Rows:
        """A result of the last run, as memory that the next one may overwrite."""
        values: Rows = self._binder.pull(call.results[name])
        return values
