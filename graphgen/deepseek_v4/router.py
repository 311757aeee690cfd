"""Expert routing: sqrt-softplus scores, chosen by score + bias or by the token's hash table."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.deepseek_v4.step import StepValues
from cachegraph.graphgen.layers.linear import FloatLinear, joined
from cachegraph.graphgen.layers.routing import Routing
from cachegraph.graphgen.weights.parameter import Read, tensor, vector
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.errors import CheckpointError


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
        return Routing(scores, columns, weights, values.num_tokens, self.config.num_experts)


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
