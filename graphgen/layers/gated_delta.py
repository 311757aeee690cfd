"""The gated delta rule: a matrix state per head, decayed and corrected by every token.

S_t = exp(g_t) S_(t-1) + k_t delta_t^T with delta_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t), and
o_t = S_t^T q_t. Two lowerings: plain matrix products, and one node of ONNX Runtime that gives the
last state alone. Both take and give the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder

from cachegraph.graphgen.layers.linear import with_shape
from cachegraph.graphgen.layers.ranges import iota
from cachegraph.graphgen.layers.state_step import StateStep
from cachegraph.graphgen.layers.triangular import Triangle, solve, triangle
from cachegraph.models.errors import ConfigError
from cachegraph.models.export_options import Dialect

# Products over all pairs of tokens: memory grows with the square of the step.
LONGEST_STEP = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSizes:
    """Heads and their widths; each key head serves value_heads / key_heads consecutive ones."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"{self.value_heads} value heads are no multiple of {self.key_heads} key heads"
            )

    @property
    def width(self) -> int:
        """Values of a state [Hv, dk, dv]: one row of its cache."""
        return self.value_heads * self.key_dim * self.value_dim


class DeltaTokens(NamedTuple):
    """What the tokens of a step bring; queries and keys are normalised, queries scaled.

    q, k: [S, P, Hk, dk]. v: [S, P, Hv, dv]. beta, g: [S, P, Hv]; g is a log decay, at most 0.
    """

    q: ir.Value
    k: ir.Value
    v: ir.Value
    beta: ir.Value
    g: ir.Value


def gated_delta(
    sizes: DeltaSizes, dialect: Dialect, *, snapshots: int, max_step: int
) -> ChunkedDelta | FusedDelta:
    """The rule of the layers of these sizes; ConfigError where no lowering runs.

    snapshots: states kept beside the last. max_step: the longest step.
    """
    if dialect is Dialect.ORT and not snapshots:
        return FusedDelta(sizes)
    if max_step > LONGEST_STEP:
        raise ConfigError(
            f"steps of {max_step} tokens: the gated delta rule as matrix products takes "
            f"{LONGEST_STEP} at most; export with a smaller max_step, or with the ort dialect "
            "and no snapshots"
        )
    return ChunkedDelta(sizes, max_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkStep:
    """Shared values of one step; Z = S*Hv heads of all streams.

    causal, earlier [P, P]: 1 where the column's token is the row's or earlier, or only earlier.
    by_head: shapes [-1, P, d] by d. by_stream, by_token: shapes [-1, Hv, P, dv] and [-1, P].
    kept_idxs [KR, Z, 1]: rows of a table [Z*P, n].
    """

    triangle: Triangle
    causal: ir.Value
    earlier: ir.Value
    by_head: dict[int, ir.Value]
    by_stream: ir.Value
    by_token: ir.Value
    kept_idxs: ir.Value


@dataclass(frozen=True, slots=True)
class ChunkedDelta:
    """All tokens of a step at once, and the states after any of them, by matrix products.

    The deltas solve one unit lower triangular system. Padded tokens come last and reach no other.
    """

    sizes: DeltaSizes
    max_step: int

    def step(self, op: OpBuilder, state: StateStep) -> ChunkStep:
        """Emit the shared values, once per step."""
        sizes, num_steps = self.sizes, state.num_steps
        row = iota(op, num_steps)
        column = op.Unsqueeze(row, [1])
        heads = op.Mul(state.num_streams, [sizes.value_heads])  # [1]: Z
        first = op.Reshape(op.Mul(iota(op, heads), num_steps), [-1, sizes.value_heads])
        local = op.Unsqueeze(op.Mod(state.kept_tokens, num_steps), [2])
        kept = op.Add(local, first)  # [KR, S, 1] + [S, Hv]
        return ChunkStep(
            triangle=triangle(op, num_steps, self.max_step),
            causal=op.Cast(op.LessOrEqual(row, column), to=ir.DataType.FLOAT),
            earlier=op.Cast(op.Less(row, column), to=ir.DataType.FLOAT),
            by_head={
                width: op.Concat([-1], num_steps, [width], axis=0)
                for width in sorted({1, sizes.key_dim, sizes.value_dim})
            },
            by_stream=op.Concat([-1, sizes.value_heads], num_steps, [sizes.value_dim], axis=0),
            by_token=op.Concat([-1], num_steps, axis=0),
            kept_idxs=op.Reshape(kept, op.Concat([-1], heads, [1], axis=0)),
        )

    def emit(
        self, op: OpBuilder, tokens: DeltaTokens, state: ir.Value, step: ChunkStep
    ) -> tuple[ir.Value, ir.Value]:
        """Outputs [S, P, Hv, dv], and kept states [KR*S, Hv*dk*dv] in the order of kept_rows.

        state [S, Hv*dk*dv]: before the step.
        """
        sizes = self.sizes
        q, k = (self._by_head(op, self._repeated(op, x), step) for x in (tokens.q, tokens.k))
        v = op.Reshape(
            op.Transpose(tokens.v, perm=[0, 2, 1, 3]), step.by_head[sizes.value_dim]
        )
        beta, g = (
            op.Reshape(op.Transpose(x, perm=[0, 2, 1]), step.by_head[1])  # [Z, P, 1]
            for x in (tokens.beta, tokens.g)
        )
        state = op.Reshape(state, [-1, sizes.key_dim, sizes.value_dim])  # [Z, dk, dv]
        keys = op.Transpose(k, perm=[0, 2, 1])
        both = op.Concat(k, q, axis=1)  # [Z, 2P, dk]
        k_keys, q_keys = _halves(op, op.MatMul(both, keys))
        k_state, q_state = _halves(op, op.MatMul(both, state))
        between, since = self._decays(op, g, step)
        wanted = op.Mul(beta, op.Sub(v, op.Mul(since, k_state)))
        lower = op.Mul(beta, op.Mul(k_keys, between))
        deltas = solve(op, lower, wanted, sizes.value_dim, step.triangle)  # [Z, P, dv]
        out = op.MatMul(op.Mul(q_keys, between), deltas)
        out = op.Reshape(op.Add(out, op.Mul(since, q_state)), step.by_stream)
        # The state after a kept token is the old one and every delta up to it, decayed.
        shares = op.Gather(op.Reshape(since, [-1, 1]), step.kept_idxs, axis=0)
        parts = op.Gather(op.Reshape(between, step.by_token), step.kept_idxs, axis=0)
        gained = op.MatMul(op.Mul(keys, parts), deltas)  # [KR,Z,dk,P] x [Z,P,dv]
        kept = op.Add(op.Mul(state, shares), gained)
        return op.Transpose(out, perm=[0, 2, 1, 3]), op.Reshape(kept, [-1, sizes.width])

    def _repeated(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """[S, P, Hk, dk] -> [S, P, Hv, dk], each key head several times in a row."""
        heads = self.sizes.key_heads
        times = self.sizes.value_heads // heads
        if times == 1:
            return x
        return op.Gather(x, np.repeat(np.arange(heads), times).tolist(), axis=2)

    def _by_head(self, op: OpBuilder, x: ir.Value, step: ChunkStep) -> ir.Value:
        """[S, P, Hv, dk] -> [Z, P, dk]."""
        x = op.Transpose(x, perm=[0, 2, 1, 3])
        return op.Reshape(x, step.by_head[self.sizes.key_dim])

    def _decays(
        self, op: OpBuilder, g: ir.Value, step: ChunkStep
    ) -> tuple[ir.Value, ir.Value]:
        """Of token j's delta at token i: [Z, P, P], 0 where j > i; of the old state: [Z, P, 1].

        Each is the exponential of a sum over the tokens in between, never of a difference of sums
        from the start, which loses digits after strong decays. No sum is above 0.
        """
        between = op.Exp(op.CumSum(op.Mul(g, step.earlier), 1))
        return op.Mul(between, step.causal), op.Exp(op.CumSum(g, 1))


@dataclass(frozen=True, slots=True)
class FusedDelta:
    """com.microsoft LinearAttention, which gives the state after the last token alone.

    Its `state_window` of several states runs on CUDA only.
    """

    sizes: DeltaSizes

    def step(self, op: OpBuilder, state: StateStep) -> ir.Value:
        """Emit the shared value, once per step: [S, P, 1], 1 for real tokens, 0 for padded ones."""
        count = op.Unsqueeze(state.plan.n_tokens, [1])
        is_real = op.Less(iota(op, state.num_steps), count)  # [P] < [S, 1]
        return op.Unsqueeze(op.Cast(is_real, to=ir.DataType.FLOAT), [2])

    def emit(
        self, op: OpBuilder, tokens: DeltaTokens, state: ir.Value, step: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Outputs [S, P, Hv, dv], and the last states [S, Hv*dk*dv].

        state [S, Hv*dk*dv]: before the step. A padded token neither decays nor adds.
        """
        sizes = self.sizes
        heads, dk, dv = sizes.value_heads, sizes.key_dim, sizes.value_dim
        out, last = op.LinearAttention(
            *(op.Reshape(x, [0, 0, -1]) for x in (tokens.q, tokens.k, tokens.v)),
            op.Reshape(state, [-1, heads, dk, dv]),
            op.Mul(tokens.g, step),
            op.Mul(tokens.beta, step),
            q_num_heads=sizes.key_heads,
            kv_num_heads=heads,
            update_rule="gated_delta",
            scale=1.0,
            _domain="com.microsoft",
            _outputs=2,
        )
        out = with_shape(out, ["S", "P", heads * dv])
        last = with_shape(last, ["S", heads, dk, dv])
        return op.Reshape(out, [0, 0, heads, dv]), op.Reshape(last, [-1, sizes.width])


def _halves(op: OpBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """[Z, 2P, n] -> twice [Z, P, n]."""
    first, second = op.Split(x, axis=1, num_outputs=2, _outputs=2)
    return first, second
