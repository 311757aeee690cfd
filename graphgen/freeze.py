"""Turns a template into the static graph of one bucket.

Symbolic dims become numbers; Shape and everything computed from constants alone is folded; then
every value gets its static shape. Nodes that a fold made useless are dropped. A build-time check
demands that every value has an all-integer shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from cachegraph.models.errors import GraphBuildError

Array = NDArray[Any]
# Host-size arithmetic only: folding never computes anything with a weight or a token.
_FOLDERS: Mapping[str, Callable[..., Array]] = {
    "Concat": lambda *xs, axis: np.concatenate(xs, axis=axis),
    "Squeeze": lambda x, axes: np.squeeze(x, tuple(axes.tolist())),
    "Range": lambda start, stop, step: np.arange(start, stop, step, dtype=start.dtype),
    "ReduceProd": lambda x, axes, keepdims: np.prod(
        x, axis=tuple(axes.tolist()), keepdims=bool(keepdims), dtype=x.dtype
    ),
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.floor_divide,  # of sizes, which are never negative
    "Min": np.minimum,
}


def freeze(template: onnx.ModelProto, dims: Mapping[str, int]) -> onnx.ModelProto:
    """The static graph of the bucket whose dimensions are `dims`. The template is not changed."""
    model = ir.from_proto(template)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = _numbers(value, dims)
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                # Shape inference knows only ai.onnx: the shapes declared for others are kept.
                value.shape = _numbers(value, dims) if node.domain else None
    _fold(model.graph)
    RemoveUnusedNodesPass()(model)
    return _with_shapes(ir.to_proto(model), template)


def _numbers(value: ir.Value, dims: Mapping[str, int]) -> ir.Shape:
    sizes = []
    for dim in value.shape or ():
        if isinstance(dim, int):
            sizes.append(dim)
        elif dim.value in dims:
            sizes.append(dims[str(dim.value)])
        else:
            raise GraphBuildError(f"{value.name}: no size given for dimension {dim.value!r}")
    return ir.Shape(sizes)


def _fold(graph: ir.Graph) -> None:
    """Replace size arithmetic by initializers, in node order."""
    known: dict[ir.Value, Array] = {}
    for node in list(graph):
        folded = _folded(node, known)
        if folded is None:
            continue
        output = node.outputs[0]
        constant = ir.Value(
            name=f"{output.name}_folded",
            shape=ir.Shape(folded.shape),
            type=ir.TensorType(ir.DataType.from_numpy(folded.dtype)),
            const_value=ir.tensor(folded, name=f"{output.name}_folded"),
        )
        graph.register_initializer(constant)
        output.replace_all_uses_with(constant)
        known[constant] = folded


def _folded(node: ir.Node, known: Mapping[ir.Value, Array]) -> Array | None:
    if node.op_type == "Shape":
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        if shape is None or not shape.is_static():
            raise GraphBuildError(f"{node.name}: Shape of a value whose shape is not known")
        start = node.attributes["start"].as_int() if "start" in node.attributes else 0
        end = node.attributes["end"].as_int() if "end" in node.attributes else None
        return np.array(shape.numpy()[start:end], np.int64)
    if node.op_type not in _FOLDERS or node.domain:
        return None
    values = [_constant(value, known) for value in node.inputs]
    if any(value is None for value in values):
        return None
    attributes = {name: attr.value for name, attr in node.attributes.items()}
    return _FOLDERS[node.op_type](*values, **attributes)


def _constant(value: ir.Value | None, known: Mapping[ir.Value, Array]) -> Array | None:
    if value is None:
        return None
    if value in known:
        return known[value]
    tensor = value.const_value
    if tensor is None or isinstance(tensor, ir.ExternalTensor):
        return None
    return tensor.numpy()


def _with_shapes(model: onnx.ModelProto, template: onnx.ModelProto) -> onnx.ModelProto:
    """Infer every shape; com.microsoft results keep the shapes the builder declared."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False, data_prop=True)
    named = {v.name: v for v in inferred.graph.value_info}
    missing = [
        name
        for node in inferred.graph.node
        for name in node.output
        if name and not _is_static(named.get(name)) and not _is_output(inferred, name)
    ]
    if missing:
        raise GraphBuildError(
            f"{len(missing)} values have no static shape, the first is {missing[0]!r}"
        )
    return inferred


def _is_output(model: onnx.ModelProto, name: str) -> bool:
    return any(value.name == name for value in model.graph.output)


def _is_static(info: onnx.ValueInfoProto | None) -> bool:
    if info is None or not info.type.tensor_type.HasField("shape"):
        return False
    return all(dim.HasField("dim_value") for dim in info.type.tensor_type.shape.dim)
