"""Runs emitted pieces of a graph on CPU ONNX Runtime, and makes the feeds of a planned step.

A piece is any function that adds nodes; its weights go through the product's own recipes, layout
and file. Plans come from the runtime's planners, so that a component meets them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray
from onnxscript import GraphBuilder, OpBuilder

from cachegraph.graphgen.weights.parameter import Read, Weight
from cachegraph.graphgen.weights.writer import attach, plan_layout, write_weights
from cachegraph.models.buckets import Bucket, BucketLadder
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, Contract
from cachegraph.models.planner_specs import PlannerSpecs, dims
from cachegraph.runtime.cells import CellTable
from cachegraph.runtime.hybrid import HybridMemory
from cachegraph.runtime.memory import initial_caches
from cachegraph.runtime.padding import Filler
from cachegraph.runtime.planners.step import StepPlan, StepSizes, pick_bucket, plan_step
from cachegraph.runtime.split import UBatch

Array = NDArray[Any]
Values = Mapping[str, ir.Value]
Emit = Callable[[OpBuilder, Values], Sequence[ir.Value]]


def run_emitted(
    folder: Path, emit: Emit, feeds: Mapping[str, Array], read: Read
) -> list[NDArray[np.float32]]:
    """The f32 outputs of a piece for these inputs; `read` gives checkpoint tensors by name."""
    return run(open_emitted(folder, emit, feeds, read), feeds)


def open_emitted(
    folder: Path, emit: Emit, feeds: Mapping[str, Array], read: Read
) -> onnxruntime.InferenceSession:
    """A session of a piece whose inputs are of the types and ranks of these; sizes are free.

    Modules keep the graph they were first called in: emit each once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    domains = {"": 21, "com.microsoft": 1}
    graph = ir.Graph(inputs=[], outputs=[], nodes=[], name="piece", opset_imports=domains)
    builder = GraphBuilder(graph)
    values = {name: _declare(builder, name, array) for name, array in feeds.items()}
    for number, output in enumerate(emit(builder.op, values)):
        output.type = ir.TensorType(ir.DataType.FLOAT)
        builder.add_output(output, f"output.{number}")
    weights = [value for value in graph.initializers.values() if isinstance(value, Weight)]
    layout = plan_layout(weights)
    attach(weights, layout, "weights.safetensors")
    recipes = dict.fromkeys(weight.recipe for weight in weights)
    write_weights(folder / "weights.safetensors", layout, recipes, read, lambda size: None)
    onnx.save(ir.to_proto(ir.Model(graph, ir_version=10)), folder / "piece.onnx")
    return open_session(folder / "piece.onnx")


def _declare(builder: GraphBuilder, name: str, array: Array) -> ir.Value:
    shape = ir.Shape([f"{name}.{axis}" for axis in range(array.ndim)])
    return builder.input(
        name, shape=shape, type=ir.TensorType(ir.DataType.from_numpy(array.dtype))
    )


def open_session(
    path: Path, overrides: Mapping[str, int] | None = None
) -> onnxruntime.InferenceSession:
    """A CPU session on one thread, with free dimensions set to numbers where given."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    for name, size in (overrides or {}).items():
        options.add_free_dimension_override_by_name(name, size)
    return onnxruntime.InferenceSession(
        str(path), sess_options=options, providers=["CPUExecutionProvider"]
    )


def run(session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> list[Array]:
    """All outputs for the feeds that the session has inputs for."""
    wanted = {value.name for value in session.get_inputs()}
    return session.run(None, {name: feeds[name] for name in feeds if name in wanted})


@dataclass(kw_only=True)
class World:
    """Plans steps for a contract and keeps caches outside any engine.

    A caller feeds `feeds(...)`, runs something, hands the new caches to `commit`. first: the
    position of a sequence's first token.
    """

    contract: Contract
    planners: PlannerSpecs
    ladder: BucketLadder
    first: int = 0
    caches: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        self.caches = initial_caches(self.contract)
        self._cells = CellTable(self.contract.layout(CacheKind.RAW), self.planners.raw)
        self._sizes = StepSizes.of(self.planners, self.contract)
        self._filler = Filler(self.contract, self.planners)

    def plan(
        self, tokens: Mapping[int, Sequence[int]], *, all_logits: bool = True
    ) -> StepPlan:
        """The plan of the next tokens of some sequences, as many of each.

        All of them want logits, or the last of each sequence.
        """
        starts = {seq: max(self.first, self._cells.next_position(seq)) for seq in tokens}
        return plan_step(self._sizes, self._cells, _ubatch(tokens, starts, all_logits))

    def bucket(self, plan: StepPlan) -> Bucket:
        """The bucket that the engine would pick."""
        return pick_bucket(self.planners, self.ladder, plan)

    def feeds(self, plan: StepPlan, bucket: Bucket) -> dict[str, Array]:
        """Every graph input, padded to a bucket, caches included."""
        sizes = dims(self.planners, bucket)
        rows = self.contract.host_rows
        buffers = {row.name: np.full(row.resolve(sizes), -7, np.int64) for row in rows}
        self._filler.fill(sizes, plan, buffers)
        return {**buffers, **self.caches}

    def commit(self, plan: StepPlan, caches: Mapping[str, Array]) -> None:
        """The step succeeded; caches by input name."""
        self._cells.commit(plan.reservation)
        self.caches |= caches


@dataclass(kw_only=True)
class HybridWorld(World):
    """The same for a model with recurrent states; its text has equal positions on all axes."""

    capacity: Capacity

    def __post_init__(self) -> None:
        self.caches = initial_caches(self.contract)
        self._memory = HybridMemory(self.contract, self.planners, self.capacity)
        self._filler = Filler(self.contract, self.planners)

    def plan(
        self, tokens: Mapping[int, Sequence[int]], *, all_logits: bool = True
    ) -> StepPlan:
        """As of `World.plan`."""
        starts = {seq: self._memory.length(seq) for seq in tokens}
        ubatch = _ubatch(tokens, starts, all_logits)
        places = np.repeat(ubatch.positions[:, None], 3, axis=1)
        return self._memory.plan(replace(ubatch, places=places))

    def commit(self, plan: StepPlan, caches: Mapping[str, Array]) -> None:
        """As of `World.commit`."""
        self._memory.commit(plan)
        self.caches |= caches


def _ubatch(
    tokens: Mapping[int, Sequence[int]], starts: Mapping[int, int], all_logits: bool
) -> UBatch:
    """As many tokens of each sequence, from its start on."""
    streams = sorted(tokens)
    step = len(tokens[streams[0]])
    is_last = np.arange(step * len(streams)) % step == step - 1
    return UBatch(
        tokens=np.concatenate([tokens[seq] for seq in streams]),
        positions=np.concatenate([starts[seq] + np.arange(step) for seq in streams]),
        streams=tuple(streams),
        step=step,
        source=np.arange(step * len(streams)),
        wants_logits=is_last | all_logits,
    )
