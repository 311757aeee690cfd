"""The graphs of a split model as one: each stage on its device, streams handed to the next.

Has the calls of `GraphPart`, so that steps need not know of stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from cachegraph.models.buckets import Bucket
from cachegraph.models.contract import CARRIED, STREAMS, Contract
from cachegraph.models.planner_specs import PlannerSpecs
from cachegraph.runtime.binding import Binder, BoundCall, Buffer
from cachegraph.runtime.ngram_tables import NgramTables
from cachegraph.runtime.opening import OpenGraph
from cachegraph.runtime.part import GraphPart, Rows
from cachegraph.runtime.planners.step import StepPlan


def graph_of(
    stages: Sequence[OpenGraph],
    planners: PlannerSpecs,
    caches: Mapping[str, Buffer],
    results: Collection[str],
    tables: NgramTables | None = None,
) -> GraphPart | StageChain:
    """One graph, or a chain of stages. results: those asked of the last stage.

    tables: of the host; no model with any is split.
    """
    last = len(stages) - 1
    parts = [
        GraphPart(
            stage.session,
            stage.binder,
            stage.contract,
            planners,
            {spec.name: caches[spec.name] for spec in stage.contract.caches},
            results if number == last else {STREAMS},
            tables,
        )
        for number, stage in enumerate(stages)
    ]
    return StageChain(parts, [stage.binder for stage in stages]) if last else parts[0]


class StageChain:
    """Stages in order. Two neighbours on one device share the buffer of the streams between."""

    def __init__(self, parts: Sequence[GraphPart], binders: Sequence[Binder]) -> None:
        """binders: the device of each stage; neighbours on one device have the same one."""
        self.parts = tuple(parts)
        self._binders = tuple(binders)
        self._calls: dict[Bucket, BoundCall] = {}

    @property
    def contract(self) -> Contract:
        """The last stage's, which has the results."""
        return self.parts[-1].contract

    @property
    def providers(self) -> list[str]:
        """The execution provider of each stage."""
        return [provider for part in self.parts for provider in part.providers]

    def bound(self, bucket: Bucket) -> BoundCall:
        """As of `GraphPart.bound`."""
        if bucket not in self._calls:
            calls: list[BoundCall] = []
            for number, part in enumerate(self.parts):
                given = None
                if number and self._binders[number] is self._binders[number - 1]:
                    given = {CARRIED: calls[-1].results[STREAMS]}
                calls.append(part.bound(bucket, given))
            self._calls[bucket] = replace(calls[-1], stages=tuple(calls))
        return self._calls[bucket]

    def prepare(self, bucket: Bucket, plan: StepPlan) -> BoundCall:
        """As of `GraphPart.prepare`."""
        call = self.bound(bucket)
        for part in self.parts:
            part.prepare(bucket, plan)
        return call

    def run(self, call: BoundCall) -> None:
        """Run every stage, as `GraphPart.run` does one."""
        streams: Rows | None = None
        for part, binder, own in zip(self.parts, self._binders, call.stages, strict=True):
            if CARRIED in own.inputs and streams is not None:
                own.inputs[CARRIED].array[...] = streams
                binder.push(own.inputs[CARRIED])
            part.run(own)
            if part is not self.parts[-1] and self._crosses(part):
                streams = part.result(own, STREAMS)

    def result(self, call: BoundCall, name: str) -> Rows:
        """As of `GraphPart.result`."""
        return self.parts[-1].result(call.stages[-1], name)

    def close(self) -> None:
        """Free sessions and buffers."""
        self._calls.clear()
        for part in self.parts:
            part.close()

    def _crosses(self, part: GraphPart) -> bool:
        """Whether the next stage is on another device."""
        number = self.parts.index(part)
        return self._binders[number] is not self._binders[number + 1]
