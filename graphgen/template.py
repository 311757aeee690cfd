"""Builds the template graph of a model: contract rows in, contract rows out, sizes symbolic.

Weights are declared with their place in the bundle's weights file; no data is touched here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

from cachegraph.graphgen.cache_ops import ONNX_TYPES
from cachegraph.graphgen.weights.parameter import Weight
from cachegraph.models.contract import Contract, TensorRow
from cachegraph.models.errors import GraphBuildError

OPSET = 21  # the lowest that has blocked DequantizeLinear of INT4
IR_VERSION = 10  # the lowest that has INT4
Emit = Callable[[OpBuilder, Contract, Mapping[str, ir.Value]], Mapping[str, ir.Value]]


@dataclass(frozen=True, slots=True)
class Template:
    """A built graph and the weights it needs, in graph order."""

    model: ir.Model
    weights: tuple[Weight, ...]


def build_template(emit: Emit, contract: Contract, *, name: str) -> Template:
    """Emit a model between the inputs and outputs that the contract declares."""
    graph = ir.Graph(
        inputs=[],
        outputs=[],
        nodes=[],
        name=name,
        opset_imports={"": OPSET, "com.microsoft": 1},
    )
    builder = GraphBuilder(graph)
    inputs = {row.name: _declare(builder, row) for row in contract.inputs}
    outputs = emit(builder.op, contract, inputs)
    for row in contract.outputs:
        if row.name not in outputs:
            raise GraphBuildError(
                f"the model emitted no {row.name!r}, which the contract lists"
            )
        builder.add_output(_typed(outputs[row.name], row), row.name)
    _drop_unused_domains(graph)
    weights = [v for v in graph.initializers.values() if isinstance(v, Weight)]
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name="cachegraph")
    return Template(model, tuple(weights))


def onnx_shape(row: TensorRow) -> ir.Shape:
    """The row's shape with symbolic dims left as names."""
    return ir.Shape(list(row.shape))


def onnx_type(row: TensorRow) -> ir.TensorType:
    """The row's element type."""
    return ir.TensorType(ONNX_TYPES[row.dtype])


def _declare(builder: GraphBuilder, row: TensorRow) -> ir.Value:
    return builder.input(row.name, shape=onnx_shape(row), type=onnx_type(row))


def _typed(value: ir.Value, row: TensorRow) -> ir.Value:
    value.shape, value.type = onnx_shape(row), onnx_type(row)
    return value


def _drop_unused_domains(graph: ir.Graph) -> None:
    used = {node.domain for node in graph} | {""}
    for domain in set(graph.opset_imports) - used:
        del graph.opset_imports[domain]
