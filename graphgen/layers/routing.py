"""Which experts each token uses, and the forms in which expert layers take that."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir
from onnxscript import OpBuilder

from cachegraph.graphgen.layers.masks import MASKED


class Routing(NamedTuple):
    """scores [T, E], from which weights are made; columns int64 [T, K] chosen; weights [T, K].

    The weights sum to 1; factors are applied to the experts' sum. num_tokens [1]: T.
    """

    scores: ir.Value
    columns: ir.Value
    weights: ir.Value
    num_tokens: ir.Value
    num_experts: int


def dense_weights(op: OpBuilder, routing: Routing) -> ir.Value:
    """[T, E]: the weight of each expert, 0 where it was not chosen."""
    return _spread(op, routing, routing.weights, 0.0)


def log_weights(op: OpBuilder, routing: Routing) -> ir.Value:
    """[T, E]: log of the weight of each chosen expert, MASKED elsewhere.

    A softmax over the k largest of them gives the weights back.
    """
    return _spread(op, routing, op.Log(routing.weights), MASKED)


def choice_marks(op: OpBuilder, routing: Routing) -> ir.Value:
    """[T, E]: 1 for each chosen expert, else 0."""
    ones = op.Pow(routing.weights, 0.0)  # of a weight of 0 too
    return _spread(op, routing, ones, 0.0)


def _spread(op: OpBuilder, routing: Routing, chosen: ir.Value, rest: float) -> ir.Value:
    shape = op.Concat(routing.num_tokens, [routing.num_experts], axis=0)
    return op.ScatterElements(op.Expand(rest, shape), routing.columns, chosen, axis=1)
