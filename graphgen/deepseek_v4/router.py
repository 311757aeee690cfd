"""Expert routing: sqrt-softplus scores, chosen by score + bias or by the token's hash table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.deepseek_v4.step import MASKED, StepValues
from cachegraph.graphgen.layers.linear import FloatLinear, joined
from cachegraph.graphgen.weights.parameter import Read, tensor, vector
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.errors import CheckpointError


class Routing(NamedTuple):
    """scores [T, E] unbiased; columns int64 [T, K] chosen; weights [T, K] of the chosen.

    The weights sum to 1; the routed scaling factor is applied to the experts' sum.
    """

    scores: ir.Value
    columns: ir.Value
    weights: ir.Value


class Router(nn.Module):
    """Router of one layer; `prefix` is the checkpoint path, such as layers.3.ffn.gate."""

    def __init__(self, config: DeepseekV4Config, prefix: str, is_hash: bool) -> None:
        super().__init__()
        self.config, self.is_hash = config, is_hash
        experts = config.num_experts
        self.gate = FloatLinear(joined([f"{prefix}.weight"]), config.hidden_size, experts)
        if is_hash:
            self.tid2eid = tensor(
                lambda read: _distinct(f"{prefix}.tid2eid", read),
                [config.vocab_size, config.experts_per_token],
                ir.DataType.INT64,
            )
        else:
            self.bias = vector(f"{prefix}.bias", experts)

    def forward(self, op: OpBuilder, x: ir.Value, values: StepValues) -> Routing:
        """x [T, D] -> the routing of each token."""
        scores = op.Sqrt(op.Softplus(self.gate(op, x)))
        if self.is_hash:
            columns = op.Gather(self.tid2eid, values.tokens, axis=0)
        else:
            ranked = op.Add(scores, self.bias)
            top = [self.config.experts_per_token]
            _, columns = op.TopK(ranked, top, axis=-1, sorted=1, _outputs=2)
        chosen = op.GatherElements(scores, columns, axis=1)
        weights = op.Div(chosen, op.ReduceSum(chosen, [1], keepdims=1))
        return Routing(scores, columns, weights)


def _distinct(name: str, read: Read) -> NDArray[np.int64]:
    """The table; CheckpointError where a token has one expert twice, which would lose a weight."""
    table = read(name).astype(np.int64)
    ranked = np.sort(table, axis=1)
    twice = (ranked[:, 1:] == ranked[:, :-1]).any(axis=1)
    if twice.any():
        raise CheckpointError(
            f"{name}: token {int(twice.argmax())} names an expert twice; the expert layers add "
            "each expert once, so this checkpoint cannot be exported"
        )
    return table


def dense_weights(
    op: OpBuilder, config: DeepseekV4Config, routing: Routing, values: StepValues
) -> ir.Value:
    """[T, E]: the weight of each expert, 0 where it was not chosen."""
    return _spread(op, config, routing, routing.weights, 0.0, values)


def log_weights(
    op: OpBuilder, config: DeepseekV4Config, routing: Routing, values: StepValues
) -> ir.Value:
    """[T, E]: log of the weight of each chosen expert, MASKED elsewhere.

    A softmax over the k largest of them gives the weights back.
    """
    return _spread(op, config, routing, op.Log(routing.weights), MASKED, values)


def choice_marks(
    op: OpBuilder, config: DeepseekV4Config, routing: Routing, values: StepValues
) -> ir.Value:
    """[T, E]: 1 for each chosen expert, else 0."""
    ones = op.Div(routing.weights, routing.weights)
    return _spread(op, config, routing, ones, 0.0, values)


def _spread(
    op: OpBuilder,
    config: DeepseekV4Config,
    routing: Routing,
    chosen: ir.Value,
    rest: float,
    values: StepValues,
) -> ir.Value:
    shape = op.Concat(values.num_tokens, [config.num_experts], axis=0)
    return op.ScatterElements(op.Expand(rest, shape), routing.columns, chosen, axis=1)
