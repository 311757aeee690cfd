"""A gated delta layer: a short convolution, the delta rule, and a gated norm of its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.cache_ops import CacheOps, Stored
from cachegraph.graphgen.layers.causal_conv import CausalConv, ConvSizes, ConvStep
from cachegraph.graphgen.layers.gated_delta import (
    ChunkedDelta,
    DeltaSizes,
    DeltaTokens,
    FusedDelta,
    gated_delta,
)
from cachegraph.graphgen.layers.gated_norm import GateActivation, GatedNorm
from cachegraph.graphgen.layers.linear import FloatLinear, joined, linear
from cachegraph.graphgen.layers.state_step import StateStep
from cachegraph.graphgen.weights.parameter import Read, tensor, vector
from cachegraph.models.contract import CacheKind
from cachegraph.models.export_options import ExportOptions
from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig

_EPS = 1e-6  # of the norm of keys and queries


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaLayerStep:
    """Shared values: states, convolution and rule of a step."""

    states: StateStep
    conv: ConvStep
    rule: Any


def conv_sizes(config: Qwen4ExpConfig) -> ConvSizes:
    """The convolution over queries, keys and values."""
    return ConvSizes(channels=config.conv_channels, kernel=config.linear_conv_kernel)


def delta_sizes(config: Qwen4ExpConfig) -> DeltaSizes:
    """Heads of the rule."""
    return DeltaSizes(
        key_heads=config.linear_key_heads,
        value_heads=config.linear_value_heads,
        key_dim=config.linear_key_dim,
        value_dim=config.linear_value_dim,
    )


def delta_rule(config: Qwen4ExpConfig, options: ExportOptions) -> ChunkedDelta | FusedDelta:
    """The rule in the lowering of the chosen dialect."""
    return gated_delta(
        delta_sizes(config),
        options.dialect,
        snapshots=options.capacity.rewind,
        max_step=options.capacity.max_step,
    )


class DeltaLayer(nn.Module):
    """Mixes tokens through a recurrent state. `prefix` such as layers.0.linear_attn."""

    def __init__(self, config: Qwen4ExpConfig, prefix: str, options: ExportOptions) -> None:
        super().__init__()
        self.config, self.conv_width = config, conv_sizes(config).width
        self.ops = CacheOps(read=options.gather, write=options.scatter)
        self.rule = delta_rule(config, options)
        hidden, heads = config.hidden_size, config.linear_value_heads
        values = heads * config.linear_value_dim
        self.sizes = [config.conv_channels, values]
        self.in_proj = linear(
            [f"{prefix}.in_proj_qkv.weight", f"{prefix}.in_proj_z.weight"],
            hidden,
            sum(self.sizes),
            options,
        )
        self.in_proj_ba = FloatLinear(
            joined([f"{prefix}.in_proj_b.weight", f"{prefix}.in_proj_a.weight"]),
            hidden,
            2 * heads,
        )
        self.conv1d = CausalConv(
            joined([f"{prefix}.conv1d.weight"]), conv_sizes(config), silu=True
        )
        self.dt_bias = vector(f"{prefix}.dt_bias", heads)

        def rate(read: Read) -> NDArray[np.float32]:
            decay: NDArray[np.float32] = -np.exp(read(f"{prefix}.A_log"))
            return decay

        self.rate = tensor(rate, [heads])
        self.norm = GatedNorm(
            vector(f"{prefix}.norm.weight", config.linear_value_dim),
            values,
            config.rms_norm_eps,
            GateActivation(config.output_gate.value),
        )
        self.out_proj = linear([f"{prefix}.out_proj.weight"], values, hidden, options)

    def forward(
        self,
        op: OpBuilder,
        x: ir.Value,
        step: DeltaLayerStep,
        caches: dict[CacheKind, Stored],
    ) -> tuple[ir.Value, dict[CacheKind, Stored]]:
        """x [T, D] -> output [T, D] and the written states."""
        states = step.states
        mixed, z = op.Split(self.in_proj(op, x), self.sizes, axis=-1, _outputs=2)
        conv, state = (
            self.ops.read_rows(
                op, caches[kind], states.plan.state_read_idxs, width, [-1, width]
            )
            for kind, width in self._widths()
        )
        mixed, history = self.conv1d(op, self._by_stream(op, mixed, step), conv, step.conv)
        tokens = self._tokens(op, mixed, self._by_stream(op, self.in_proj_ba(op, x), step))
        out, kept = self.rule.emit(op, tokens, state, step.rule)
        written = {
            kind: self.ops.write_rows(op, caches[kind], states.kept_rows, rows, width)
            for (kind, width), rows in zip(self._widths(), (history, kept), strict=True)
        }
        normed = self.norm(op, out, self._by_stream(op, z, step))
        flat = op.Reshape(normed, [-1, self.sizes[1]])
        return self.out_proj(op, flat), written

    def _widths(self) -> tuple[tuple[CacheKind, int], ...]:
        return (
            (CacheKind.CONV_STATE, self.conv_width),
            (CacheKind.RECURRENT_STATE, self.config.state_width),
        )

    def _by_stream(self, op: OpBuilder, x: ir.Value, step: DeltaLayerStep) -> ir.Value:
        """[T, n] -> [S, P, n]."""
        shape = op.Concat(step.states.num_streams, step.states.num_steps, [-1], axis=0)
        return op.Reshape(x, shape)

    def _tokens(self, op: OpBuilder, mixed: ir.Value, gates: ir.Value) -> DeltaTokens:
        """What the rule takes, from the convolved [S, P, channels] and gates [S, P, 2 * Hv]."""
        config = self.config
        hk, hv = config.linear_key_heads, config.linear_value_heads
        dk, dv = config.linear_key_dim, config.linear_value_dim
        q, k, v = op.Split(mixed, [hk * dk, hk * dk, hv * dv], axis=-1, _outputs=3)
        q, k = (self._unit(op, op.Reshape(x, [0, 0, hk, dk])) for x in (q, k))
        b, a = op.Split(gates, [hv, hv], axis=-1, _outputs=2)
        return DeltaTokens(
            q=op.Mul(q, dk**-0.5),
            k=k,
            v=op.Reshape(v, [0, 0, hv, dv]),
            beta=op.Sigmoid(b),
            g=op.Mul(op.Softplus(op.Add(a, self.dt_bias)), self.rate),
        )

    def _unit(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """x / sqrt(sum x^2 + eps) of each head."""
        square = op.ReduceSum(op.Mul(x, x), [-1], keepdims=1)
        return op.Div(x, op.Sqrt(op.Add(square, _EPS)))
