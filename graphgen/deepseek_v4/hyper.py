"""Manifold-constrained hyper-connections: M residual streams mixed at every site.

Equations: specs of DeepSeek-V4, "mHC". pre, post and comb come from one projection of the flat,
unweighted-RMS-normed streams; comb is made doubly stochastic by Sinkhorn iterations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.layers.norm import rms_norm
from cachegraph.graphgen.weights.parameter import Read, tensor, vector
from cachegraph.models.deepseek_v4.config import DeepseekV4Config


class SiteMix(NamedTuple):
    """How one site mixes: post [T, M, 1] spreads its output, comb [T, M dst, M src] the streams."""

    post: ir.Value
    comb: ir.Value


class HyperConnection(nn.Module):
    """The mixing weights of one site, and the collapse of the streams into its input.

    The three scales are folded into the rows of the projection when the weights are written.
    """

    def __init__(self, config: DeepseekV4Config, prefix: str) -> None:
        super().__init__()
        self.config = config
        m, d = config.hc_mult, config.hidden_size
        self.flat_ones = [1.0] * (m * d)
        groups = [m, m, m * m]

        def fn(read: Read) -> NDArray[np.float32]:
            scale = np.repeat(read(f"{prefix}_scale"), groups)
            return np.ascontiguousarray((read(f"{prefix}_fn") * scale[:, None]).T)

        self.fn = tensor(fn, [m * d, sum(groups)])
        self.base = vector(f"{prefix}_base", sum(groups))

    def forward(self, op: OpBuilder, streams: ir.Value) -> tuple[ir.Value, SiteMix]:
        """streams [T, M, D] -> site input [T, D] and the mix for `merge`."""
        m, d = self.config.hc_mult, self.config.hidden_size
        flat = op.Reshape(streams, [-1, m * d])
        normed = rms_norm(op, flat, self.flat_ones, self.config.rms_norm_eps)
        mixes = op.Add(op.MatMul(normed, self.fn), self.base)  # [T, 2M + M*M]
        gates, comb = op.Split(mixes, [2 * m, m * m], axis=-1, _outputs=2)
        scaled = op.Mul(op.Sigmoid(gates), [1.0] * m + [2.0] * m)
        gates = op.Add(scaled, [self.config.hc_eps] * m + [0.0] * m)
        pre, post = op.Split(op.Reshape(gates, [-1, 2 * m, 1]), [m, m], axis=1, _outputs=2)
        collapsed = op.MatMul(op.Reshape(pre, [-1, 1, m]), streams)  # [T,1,M] x [T,M,D]
        comb = self._sinkhorn(op, op.Reshape(comb, [-1, m, m]))
        # The last division's eps: left out, it shifts every layer's streams the same way.
        scale = 1.0 / (1.0 + self.config.hc_eps)
        mix = SiteMix(post, op.Mul(op.Transpose(comb, perm=[0, 2, 1]), scale))
        return op.Reshape(collapsed, [-1, d]), mix

    def _sinkhorn(self, op: OpBuilder, scores: ir.Value) -> ir.Value:
        """Softmax over dst, then alternating normalisation of columns and rows, columns last.

        LpNormalization leaves out the eps of each division; `forward` makes up for the last one,
        which is the only one that scales the result.
        """
        comb = op.Add(op.Softmax(scores, axis=-1), self.config.hc_eps)
        comb = op.LpNormalization(comb, axis=1, p=1)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = op.LpNormalization(comb, axis=2, p=1)
            comb = op.LpNormalization(comb, axis=1, p=1)
        return comb


def merge(op: OpBuilder, streams: ir.Value, output: ir.Value, mix: SiteMix) -> ir.Value:
    """out[k] = post[k] * output + sum_j comb[j, k] * streams[j]: [T, M, D]."""
    spread = op.Mul(mix.post, op.Unsqueeze(output, [1]))  # [T,M,1] x [T,1,D]
    return op.Add(spread, op.MatMul(mix.comb, streams))


class HyperHead(nn.Module):
    """The final collapse: streams [n, M, D] -> [n, D] with sigmoid weights.

    `prefix` is the checkpoint path, such as hc_head.
    """

    def __init__(self, config: DeepseekV4Config, prefix: str) -> None:
        super().__init__()
        self.config = config
        m, d = config.hc_mult, config.hidden_size

        def fn(read: Read) -> NDArray[np.float32]:
            return np.ascontiguousarray((read(f"{prefix}_fn") * read(f"{prefix}_scale")).T)

        self.fn = tensor(fn, [m * d, m])
        self.base = vector(f"{prefix}_base", m)

    def forward(self, op: OpBuilder, streams: ir.Value) -> ir.Value:
        """streams [n, M, D] -> [n, D]."""
        m, d = self.config.hc_mult, self.config.hidden_size
        flat = op.Reshape(streams, [-1, m * d])
        normed = rms_norm(op, flat, [1.0] * (m * d), self.config.rms_norm_eps)
        gates = op.Sigmoid(op.Add(op.MatMul(normed, self.fn), self.base))
        pre = op.Reshape(op.Add(gates, self.config.hc_eps), [-1, 1, m])
        return op.Reshape(op.MatMul(pre, streams), [-1, d])
