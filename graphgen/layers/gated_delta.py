"""The gated delta rule: a matrix state per head, decayed and corrected by every token.

S_t = exp(g_t) S_(t-1) + k_t delta_t^T with delta_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t), and
o_t = S_t^T q_t. The deltas of a step solve one unit lower triangular system, so that all tokens are
computed by products of matrices. A decay between two tokens is the exponential of a sum over the
tokens between them alone: a difference of sums from the step's start would lose digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder

from cachegraph.graphgen.layers.state_step import StateStep, iota
from cachegraph.graphgen.layers.triangular import Triangle, solve, triangle


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSizes:
    """Heads and their widths; each key head serves value_heads / key_heads consecutive ones."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Values of a state: one row of its cache."""
        return self.value_heads * self.key_dim * self.value_dim


class DeltaTokens(NamedTuple):
    """What the tokens of a step bring; keys and queries are normalised, queries scaled.

    q, k: [S, P, Hk, dk]. v: [S, P, Hv, dv]. beta, g: [S, P, Hv]; g is a log decay, at most 0.
    """

    q: ir.Value
    k: ir.Value
    v: ir.Value
    beta: ir.Value
    g: ir.Value


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaStep:
    """Shared values of one step; Z = S*Hv heads of all streams.

    causal, earlier [P, P]: 1 where the row's token is at or after, or after, the column's. by_head:
    shapes [-1, P, d] by d. by_stream: shape [S, Hv, P, dv]. kept_idxs [KR, Z, 1]: rows of a
    [Z*P, n] table.
    """

    triangle: Triangle
    causal: ir.Value
    earlier: ir.Value
    by_head: dict[int, ir.Value]
    by_stream: ir.Value
    by_token: ir.Value
    kept_idxs: ir.Value


def delta_step(
    op: OpBuilder, step: StateStep, sizes: DeltaSizes, max_step: int
) -> DeltaStep:
    """Emit the shared values of the layers of these sizes."""
    steps = step.num_steps
    row = iota(op, steps)
    column = op.Unsqueeze(row, [1])
    heads = [sizes.value_heads]
    all_heads = op.Mul(step.num_streams, heads)  # [1]: Z
    starts = op.Mul(iota(op, all_heads), steps)  # [Z], first row of each head
    starts = op.Reshape(starts, [-1, sizes.value_heads])  # [S, Hv]
    local = op.Unsqueeze(op.Mod(step.kept_tokens, steps), [2])  # [KR, S, 1]
    kept = op.Reshape(op.Add(local, starts), op.Concat([-1], all_heads, [1], axis=0))
    widths = {1, sizes.key_dim, sizes.value_dim}
    return DeltaStep(
        triangle=triangle(op, steps, max_step),
        causal=op.Cast(op.GreaterOrEqual(column, row), to=ir.DataType.FLOAT),
        earlier=op.Cast(op.Greater(column, row), to=ir.DataType.FLOAT),
        by_head={d: op.Concat([-1], steps, [d], axis=0) for d in sorted(widths)},
        by_stream=op.Concat([-1], heads, steps, [sizes.value_dim], axis=0),
        by_token=op.Concat([-1], steps, axis=0),
        kept_idxs=kept,
    )


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The rule of one layer. Has no weights."""

    sizes: DeltaSizes

    def emit(
        self, op: OpBuilder, tokens: DeltaTokens, state: ir.Value, step: DeltaStep
    ) -> tuple[ir.Value, ir.Value]:
        """Outputs [S, P, Hv, dv], and the kept states [KR*S, Hv*dk*dv] in the order of kept_rows.

        state [S, Hv*dk*dv]: before the step.
        """
        sizes = self.sizes
        dk, dv = sizes.key_dim, sizes.value_dim
        q, k = (self._by_head(op, self._repeated(op, x), dk, step) for x in tokens[:2])
        v = self._by_head(op, tokens.v, dv, step)
        beta, g = (self._gate(op, x, step) for x in (tokens.beta, tokens.g))
        state = op.Reshape(state, [-1, dk, dv])  # [Z, dk, dv]
        keys = op.Transpose(k, perm=[0, 2, 1])
        both = op.Concat(k, q, axis=1)  # [Z, 2P, dk]
        halves = op.MatMul(both, keys), op.MatMul(both, state)
        (kk, qk), (k_old, q_old) = (op.Split(x, num_outputs=2, axis=1, _outputs=2) for x in halves)
        # Decay of token j's part at token i [Z, P, P], and of the old state at token i [Z, P, 1].
        between = op.Exp(op.CumSum(op.Mul(g, step.earlier), 1))
        between = op.Mul(between, step.causal)
        since = op.Exp(op.CumSum(g, 1))
        target = op.Mul(beta, op.Sub(v, op.Mul(since, k_old)))
        lower = op.Mul(beta, op.Mul(kk, between))
        deltas = solve(op, lower, target, dv, step.triangle)  # [Z, P, dv]
        out = op.Add(
            op.MatMul(op.Mul(qk, between), deltas), op.Mul(since, q_old)
        )
        out = op.Transpose(op.Reshape(out, step.by_stream), perm=[0, 2, 1, 3])
        flat = op.Reshape(between, step.by_token), op.Reshape(since, [-1, 1])
        weights, shares = (op.Gather(x, step.kept_idxs, axis=0) for x in flat)
        gained = op.MatMul(op.Mul(keys, weights), deltas)  # [KR, Z, dk, P] x [Z, P, dv]
        kept = op.Add(op.Mul(state, shares), gained)
        return out, op.Reshape(kept, [-1, sizes.width])

    def _repeated(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """[S, P, Hk, dk] -> [S, P, Hv, dk], each key head several times in a row."""
        heads, times = self.sizes.key_heads, self.sizes.value_heads // self.sizes.key_heads
        if times == 1:
            return x
        return op.Gather(x, np.repeat(np.arange(heads), times).tolist(), axis=2)

    def _by_head(self, op: OpBuilder, x: ir.Value, width: int, step: DeltaStep) -> ir.Value:
        """[S, P, Hv, d] -> [Z, P, d]."""
        return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), step.by_head[width])

    def _gate(self, op: OpBuilder, x: ir.Value, step: DeltaStep) -> ir.Value:
        """[S, P, Hv] -> [Z, P, 1]."""
        return op.Reshape(op.Transpose(x, perm=[0, 2, 1]), step.by_head[1])
