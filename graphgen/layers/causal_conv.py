"""Depthwise causal convolution over time, with dilation, and the history that it carries.

Taps and kept histories are both gathered from [history | tokens of this step], so that the write of
a history cache can never run before its read (DESIGN rule 6). A token sees only itself and earlier
ones, and padded tokens come last: they reach no token that counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.layers.linear import Matrix
from cachegraph.graphgen.layers.ranges import iota
from cachegraph.graphgen.layers.state_step import StateStep
from cachegraph.graphgen.weights.parameter import tensor
from cachegraph.models.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvSizes:
    """Channels, taps, and tokens from one tap to the next."""

    channels: int
    kernel: int
    dilation: int = 1

    def __post_init__(self) -> None:
        if self.kernel < 2 or self.dilation < 1:
            raise ConfigError(
                f"a causal convolution of {self.kernel} taps, {self.dilation} tokens apart, "
                "carries no history; 2 taps and 1 token are the least"
            )

    @property
    def history(self) -> int:
        """Tokens before the first one that its output depends on."""
        return (self.kernel - 1) * self.dilation

    @property
    def width(self) -> int:
        """Values of a history: one row of its cache, oldest token first."""
        return self.history * self.channels


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvStep:
    """Shared values of the convolutions of one kernel and dilation.

    tap_idxs [P, K]: tokens of [history | step] that each output reads. kept_idxs [KR*S, h]: rows of
    the same table of all streams, [S*(h+P), C], that make up each kept history.
    """

    tap_idxs: ir.Value
    kept_idxs: ir.Value


def conv_step(op: OpBuilder, step: StateStep, sizes: ConvSizes) -> ConvStep:
    """Emit the shared values; once per step for all layers of this kernel and dilation."""
    history = sizes.history
    taps = (np.arange(sizes.kernel) * sizes.dilation).tolist()
    # Row of a token behind the histories of its own and all earlier streams, plus 1 - history.
    shift = op.Add(op.Mul(iota(op, step.num_streams), history), 1)
    first = op.Reshape(op.Add(step.kept_tokens, shift), [-1, 1])  # [KR, S] -> [KR*S, 1]
    return ConvStep(
        tap_idxs=op.Add(op.Unsqueeze(iota(op, step.num_steps), [1]), taps),
        kept_idxs=op.Add(first, np.arange(history).tolist()),
    )


class CausalConv(nn.Module):
    """y[t] = sum over taps j of w[j] * x[t - (K-1-j) * dilation], per channel, without bias.

    weight gives the checkpoint's [C, 1, K]. silu: whether the result goes through it.
    """

    def __init__(self, weight: Matrix, sizes: ConvSizes, *, silu: bool) -> None:
        super().__init__()
        self.sizes, self.silu = sizes, silu
        shape = [sizes.kernel, sizes.channels]
        self.weight = tensor(
            lambda read: np.ascontiguousarray(weight(read).reshape(shape[::-1]).T), shape
        )

    def forward(
        self, op: OpBuilder, x: ir.Value, history: ir.Value, step: ConvStep
    ) -> tuple[ir.Value, ir.Value]:
        """x [S, P, C] and histories [S, h*C] -> outputs [S, P, C] and kept histories [KR*S, h*C].

        Kept ones are in the order of `StateStep.kept_rows`.
        """
        sizes = self.sizes
        old = op.Reshape(history, [-1, sizes.history, sizes.channels])
        table = op.Concat(old, x, axis=1)  # [S, h + P, C]
        taps = op.Gather(table, step.tap_idxs, axis=1)  # [S, P, K, C]
        y = op.ReduceSum(op.Mul(taps, self.weight), [2], keepdims=0)
        if self.silu:
            y = op.Mul(y, op.Sigmoid(y))
        rows = op.Reshape(table, [-1, sizes.channels])
        kept = op.Gather(rows, step.kept_idxs, axis=0)  # [KR*S, h, C]
        return y, op.Reshape(kept, [-1, sizes.width])
