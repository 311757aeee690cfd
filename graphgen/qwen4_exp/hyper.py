"""Gated residual streams: M streams of a token, read through a low-rank gate at every site.

Equations: specs of Qwen4-Exp, "Residual read". The read's grouped RMS norm is the only norm of the
residual: layers and head have none of their own.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.layers.linear import FloatLinear, joined, linear, linear_of
from cachegraph.graphgen.layers.norm import rms_norm
from cachegraph.graphgen.weights.parameter import Read, Weight, tensor
from cachegraph.graphgen.weights.quantise import BLOCK
from cachegraph.models.export_options import ExportOptions
from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig


def shifted(name: str, shape: list[int]) -> Weight:
    """The factors of a norm that is stored as its distance from 1."""
    return tensor(lambda read: 1 + read(name).reshape(shape), shape)


class GroupedNorm(nn.Module):
    """RMS norm of each residual stream by itself, [n, M, D]; `name` is its weight [M*D]."""

    def __init__(self, config: Qwen4ExpConfig, name: str) -> None:
        super().__init__()
        self.eps, self.ones = config.rms_norm_eps, [1.0] * config.hidden_size
        self.weight = shifted(name, [config.hc_count, config.hidden_size])

    def forward(self, op: OpBuilder, streams: ir.Value) -> ir.Value:
        """streams [n, M, D] -> [n, M, D]."""
        return op.Mul(rms_norm(op, streams, self.ones, self.eps), self.weight)


class StreamRead(nn.Module):
    """What a site takes from the streams, and how strongly it writes to each of them.

    `prefix` is the checkpoint path, such as layers.3.attn_hyper_connection. The division by M is
    folded into the projection. is_final: the head's read, of O rows, which writes nothing. The
    matrices of all sites are a tenth of what a token reads of the release, so that they are
    quantised too; but a rank of no whole blocks leaves `up` in float.
    """

    def __init__(
        self,
        config: Qwen4ExpConfig,
        prefix: str,
        options: ExportOptions,
        *,
        is_final: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.is_final = config, is_final
        m, width, rank = config.hc_count, config.stream_width, config.hc_lowrank
        self.norm = GroupedNorm(config, f"{prefix}.hc_norm.weight")
        names = ["input_mix_weight_down", *([] if is_final else ["block_inject_weight"])]

        def down(read: Read) -> NDArray[np.float32]:
            parts = [read(f"{prefix}.{name}.weight") for name in names]
            return (np.concatenate(parts) / np.float32(m)).astype(np.float32)

        rows = ("O",) if is_final else ("T",)
        size = rank if is_final else rank + m
        self.down = linear_of(down, f"{prefix}.{names[0]}.weight", width, size, options, rows)
        up = [f"{prefix}.input_mix_weight_up.weight"]
        self.up = (
            FloatLinear(joined(up), rank, width)
            if options.weights.bits and rank % BLOCK
            else linear(up, rank, width, options, rows)
        )

    def forward(self, op: OpBuilder, streams: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        """streams [n, M, D] -> input [n, D], and the weights [n, M, 1] of what the site returns."""
        config = self.config
        m, d, rank = config.hc_count, config.hidden_size, config.hc_lowrank
        normed = self.norm(op, streams)
        low = self.down(op, op.Reshape(normed, [-1, m * d]))
        inject = None
        if not self.is_final:
            low, logits = op.Split(low, [rank, m], axis=-1, _outputs=2)
            inject = op.Unsqueeze(op.Mul(op.Sigmoid(logits), 2.0), [-1])
        gate = op.Sigmoid(self.up(op, op.Mul(low, op.Sigmoid(low))))
        mixed = op.Mul(op.Reshape(gate, [-1, m, d]), normed)
        return op.ReduceMean(mixed, [1], keepdims=0), inject


def write(op: OpBuilder, streams: ir.Value, output: ir.Value, inject: ir.Value) -> ir.Value:
    """Add a site's output [T, D] to the streams [T, M, D], times its weight [T, M, 1] in each."""
    return op.Add(streams, op.Mul(inject, op.Unsqueeze(output, [1])))
