"""The lightning indexer: scores every exposed row and keeps the top-k of each token."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.cache_ops import CacheOps, Stored
from cachegraph.graphgen.deepseek_v4.step import CompressorStep, StepValues
from cachegraph.graphgen.layers.linear import FloatLinear, joined
from cachegraph.graphgen.layers.rope import rotate
from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind


class Indexer(nn.Module):
    """score[t, n] = sum_h w[t, h] * relu(q[t, h] . key[n]), f32; top-k by score, then lower row."""

    def __init__(self, config: DeepseekV4Config, prefix: str, ops: CacheOps) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        heads = config.index_heads * config.index_head_dim
        self.wq_b = FloatLinear(joined([f"{prefix}.wq_b.weight"]), config.q_lora_rank, heads)

    def forward(
        self,
        op: OpBuilder,
        low_rank: ir.Value,
        head_weights: ir.Value,
        keys: Stored,
        values: StepValues,
        step: CompressorStep,
    ) -> ir.Value:
        """Chosen columns of the exposed rows, int64 [T, K].

        low_rank [T, q_lora]; head_weights [T, Hi], scaled; keys: the written LID cache.
        """
        heads, width = self.config.index_heads, self.config.index_head_dim
        q = op.Reshape(self.wq_b(op, low_rank), [-1, heads, width])
        q = rotate(op, q, values.ropes[LayerKind.CSA].heads, width)
        by_stream = op.Concat(values.num_streams, [-1, width], axis=0)
        lead = op.Concat(values.num_streams, [-1, width], axis=0)
        exposed = self.ops.read_rows(op, keys, step.plan.rows, width, lead)  # [S, N, di]
        scores = op.MatMul(op.Reshape(q, by_stream), op.Transpose(exposed, perm=[0, 2, 1]))
        by_head = op.Concat([-1, heads], step.num_exposed, axis=0)
        scores = op.Reshape(op.Relu(scores), by_head)  # [S, P*Hi, N] -> [T, Hi, N]
        mixed = op.MatMul(op.Unsqueeze(head_weights, [1]), scores)  # [T, 1, N]
        total = op.Add(op.Squeeze(mixed, [1]), step.bias)
        _, columns = op.TopK(total, [self.config.index_topk], axis=-1, sorted=1, _outputs=2)
        return columns
