"""The compressor: closes blocks of `ratio` tokens into one row, and keeps the half-filled window.

A token's row is [kv | score]; with overlap each half holds two heads, first the token's part in the
NEXT block, then its part in its own. Closing windows and persisted rows are both taken from the
source table [carried state rows | rows of this step], so the write of the state ring can never run
before the reads (DESIGN rule 6).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.cache_ops import CacheOps, Stored
from cachegraph.graphgen.deepseek_v4.step import CompressorStep
from cachegraph.graphgen.layers.norm import RMSNorm
from cachegraph.graphgen.layers.rope import rotate
from cachegraph.graphgen.weights.parameter import Read, tensor, vector
from cachegraph.models.contract import CacheKind
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.contract import cache_width, ratio_of, state_kind


class Compressor(nn.Module):
    """One compressor of one layer. Its projections run fused in the attention module.

    `prefix` is the checkpoint path, such as layers.3.attn.compressor.
    """

    def __init__(self, config: DeepseekV4Config, kind: CacheKind, prefix: str, ops: CacheOps):
        super().__init__()
        self.kind, self.ops = kind, ops
        self.head = cache_width(config, kind)
        self.width = cache_width(config, state_kind(kind))

        def bias(read: Read) -> NDArray[np.float32]:
            ape = read(f"{prefix}.ape")  # added to the score half only
            return np.concatenate([np.zeros_like(ape), ape], axis=1)

        self.ape = tensor(bias, [ratio_of(config, kind), self.width])
        self.norm = RMSNorm(vector(f"{prefix}.norm.weight", self.head), config.rms_norm_eps)

    def forward(
        self,
        op: OpBuilder,
        projected: ir.Value,
        step: CompressorStep,
        caches: Mapping[CacheKind, Stored],
    ) -> dict[CacheKind, Stored]:
        """projected [T, width] -> the updated compressed rows and state ring, by kind."""
        plan, state = step.plan, caches[state_kind(self.kind)]
        rows = op.Add(projected, op.Gather(self.ape, plan.state_pos, axis=0))
        carried = self.ops.read_rows(
            op, state, plan.state_old_idxs, self.width, [-1, self.width]
        )
        source = op.Concat(carried, rows, axis=0)  # [A + T, width]
        block = self._close(op, source, step)
        kept = op.Gather(source, plan.state_persist_src_idxs, axis=0)
        return {
            self.kind: self.ops.write_rows(
                op, caches[self.kind], plan.state_write_idxs, block, self.head
            ),
            state_kind(self.kind): self.ops.write_rows(
                op, state, plan.state_persist_dst_idxs, kept, self.width
            ),
        }

    def _close(self, op: OpBuilder, source: ir.Value, step: CompressorStep) -> ir.Value:
        """Per-channel softmax over each window, weighted sum, norm, RoPE: [B, head]."""
        parts = op.Reshape(source, [-1, self.head])
        kv = op.Gather(parts, step.kv_idxs, axis=0)  # [B, window, head]
        score = op.Gather(parts, step.score_idxs, axis=0)
        pooled = op.ReduceSum(op.Mul(kv, op.Softmax(score, axis=1)), [1], keepdims=0)
        return rotate(op, self.norm(op, pooled), step.block_rope, self.head)
