"""Questions about an ONNX graph that several tests ask. Knows protos only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

# Operand that holds row numbers, by operator.
INDEX_OPERAND = {
    "Gather": 1,
    "GatherElements": 1,
    "GatherND": 1,
    "ScatterND": 1,
    "ScatterElements": 1,
}
CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}


def load(path: Path) -> onnx.ModelProto:
    """A graph file without its weights."""
    return onnx.load(path, load_external_data=False)


def ops(model: onnx.ModelProto) -> set[tuple[str, str]]:
    """Every (domain, operator) of a graph."""
    return {(node.domain, node.op_type) for node in model.graph.node}


def nodes(model: onnx.ModelProto, *kinds: str) -> list[onnx.NodeProto]:
    """The nodes of some operators."""
    return [node for node in model.graph.node if node.op_type in kinds]


def consumers(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    """The nodes that read each value, once for each time they read it."""
    found: defaultdict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            found[name].append(node)
    return found


def small_constants(model: onnx.ModelProto) -> dict[str, NDArray[np.generic]]:
    """Initializers and Constant nodes whose values stand in the graph file itself."""
    arrays = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if tensor.data_location != onnx.TensorProto.EXTERNAL
    }
    for node in nodes(model, "Constant"):
        arrays[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return arrays


def shapes(values: Iterable[onnx.ValueInfoProto]) -> dict[str, tuple[int | str, ...]]:
    """Name -> shape, with dimension names where there are no numbers; "?" where neither."""
    return {
        value.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
            for dim in value.type.tensor_type.shape.dim
        )
        for value in values
    }


def element_types(values: Iterable[onnx.ValueInfoProto]) -> dict[str, str]:
    """Name -> numpy dtype name."""
    return {
        value.name: onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
        for value in values
    }


@dataclass(frozen=True, slots=True)
class Hazard:
    """A node that reads a cache input and may run after the write."""

    cache: str
    node: str


def alias_hazards(model: onnx.ModelProto, caches: Mapping[str, str]) -> list[Hazard]:
    """Readers of cache inputs that no data edge puts before the write (DESIGN rule 6).

    caches: cache input -> output. The write is the node that makes the output, from the input as
    its first operand; every other reader must be an ancestor of one of its other operands.
    """
    maker = {name: node for node in model.graph.node for name in node.output}
    readers = consumers(model)
    hazards = []
    for source, target in caches.items():
        write = maker[target]
        assert write.input[0] == source, f"{target} is not made from {source}"
        before = _ancestors(maker, write.input[1:])
        hazards += [
            Hazard(source, node.name)
            for node in readers[source]
            if node.output[0] != write.output[0] and node.output[0] not in before
        ]
        hazards += [Hazard(source, write.name)] * (list(write.input).count(source) - 1)
    return hazards


def _ancestors(maker: Mapping[str, onnx.NodeProto], names: Iterable[str]) -> set[str]:
    """The first output of every node that some values are computed from."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        node = maker.get(waiting.pop())
        if node is not None and node.output[0] not in found:
            found.add(node.output[0])
            waiting += node.input
    return found
