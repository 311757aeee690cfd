"""Attention to the pools of tokens that an indexer chooses, and to the tokens after the last pool.

Rows are written before any is read: keys, values and raw indexer keys of the step first, then the
keys of new pools, which are made from raw ones. Equations: specs of Qwen4-Exp, "QSA".
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.cache_ops import CacheOps, Stored
from cachegraph.graphgen.layers.linear import FloatLinear, joined, linear
from cachegraph.graphgen.layers.masks import MASKED
from cachegraph.graphgen.layers.norm import RMSNorm
from cachegraph.graphgen.layers.rope import RopeTable, rotate_first
from cachegraph.graphgen.qwen4_exp.hyper import shifted
from cachegraph.graphgen.qwen4_exp.step import PooledStep, StepSizes
from cachegraph.models.contract import CacheKind
from cachegraph.models.export_options import ExportOptions, Select
from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig


class Indexer(nn.Module):
    """Scores pools by their keys: sum over heads of relu(q . key) / sqrt(width); keeps the best."""

    def __init__(self, config: Qwen4ExpConfig, prefix: str, ops: CacheOps) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        heads, width = config.index_heads, config.index_head_dim
        self.sizes = [heads * width, width]
        self.qk_proj = FloatLinear(
            joined([f"{prefix}.index_qk_proj.weight"]), config.hidden_size, sum(self.sizes)
        )
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(shifted(f"{prefix}.q_layernorm.weight", [width]), eps)
        self.k_norm = RMSNorm(shifted(f"{prefix}.k_layernorm.weight", [width]), eps)

    def forward(
        self,
        op: OpBuilder,
        x: ir.Value,
        step: PooledStep,
        sizes: StepSizes,
        caches: Mapping[CacheKind, Stored],
    ) -> tuple[ir.Value, ir.Value, dict[CacheKind, Stored]]:
        """Chosen pools of each token [T, K], which of them it sees (bool), and written caches."""
        heads, width = self.config.index_heads, self.config.index_head_dim
        q, raw = op.Split(self.qk_proj(op, x), self.sizes, axis=-1, _outputs=2)
        q = self.q_norm(op, op.Reshape(q, [-1, heads, width]))
        q = rotate_first(op, q, step.head_rope, width)
        written = self._write(op, raw, step, caches)
        lead = op.Concat(sizes.streams, [-1, width], axis=0)
        keys = self.ops.read_rows(
            op, written[CacheKind.POOLED], step.plan.pool_cells, width, lead
        )  # [S, NG, d]
        scores = op.MatMul(op.Reshape(q, lead), op.Transpose(keys, perm=[0, 2, 1]))
        by_head = op.Concat(sizes.streams, [-1, heads], step.num_pools, axis=0)
        total = op.ReduceSum(op.Reshape(op.Relu(scores), by_head), [2], keepdims=0)
        total = op.Where(step.visible, op.Mul(total, width**-0.5), -1.0)  # [S, P, NG]
        flat = op.Reshape(total, op.Concat([-1], step.num_pools, axis=0))
        best, columns = op.TopK(flat, [self.config.top_pools], axis=-1, sorted=1, _outputs=2)
        return columns, op.GreaterOrEqual(best, 0.0), written

    def _write(
        self,
        op: OpBuilder,
        raw: ir.Value,
        step: PooledStep,
        caches: Mapping[CacheKind, Stored],
    ) -> dict[CacheKind, Stored]:
        """Raw keys of the tokens, then the keys of new pools."""
        width, pool = self.config.index_head_dim, self.config.index_ratio
        plan = step.plan
        index = self.ops.write_rows(op, caches[CacheKind.INDEX], plan.k_idxs, raw, width)
        members = self.ops.read_rows(op, index, plan.new_pool_idxs, width, [-1, pool, width])
        mean = op.ReduceMean(members, [1], keepdims=0)
        keys = rotate_first(op, self.k_norm(op, mean), step.pool_rope, width)
        pooled = self.ops.write_rows(
            op, caches[CacheKind.POOLED], plan.new_pool_rep, keys, width
        )
        return {CacheKind.INDEX: index, CacheKind.POOLED: pooled}


class Attention(nn.Module):
    """One layer's attention. `prefix` is the checkpoint path, such as layers.3.self_attn."""

    def __init__(self, config: Qwen4ExpConfig, prefix: str, options: ExportOptions) -> None:
        super().__init__()
        self.config, self.select = config, options.select
        self.ops = CacheOps(read=options.gather, write=options.scatter)
        hidden, head = config.hidden_size, config.head_dim
        queries, shared = config.num_heads * head, config.num_kv_heads * head
        self.sizes = [2 * queries, shared, shared]
        self.qkv_proj = linear(
            [f"{prefix}.{part}_proj.weight" for part in ("q", "k", "v")],
            hidden,
            sum(self.sizes),
            options,
        )
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(shifted(f"{prefix}.q_norm.weight", [head]), eps)
        self.k_norm = RMSNorm(shifted(f"{prefix}.k_norm.weight", [head]), eps)
        self.o_proj = linear([f"{prefix}.o_proj.weight"], queries, hidden, options)
        self.indexer = Indexer(config, f"{prefix}.indexer", self.ops)

    def forward(
        self,
        op: OpBuilder,
        x: ir.Value,
        step: PooledStep,
        sizes: StepSizes,
        caches: Mapping[CacheKind, Stored],
    ) -> tuple[ir.Value, dict[CacheKind, Stored]]:
        """x [T, D] -> output [T, D] and the layer's written caches."""
        config = self.config
        heads, shared, width = config.num_heads, config.num_kv_heads, config.head_dim
        fused, k, v = op.Split(self.qkv_proj(op, x), self.sizes, axis=-1, _outputs=3)
        q, gate = op.Split(
            op.Reshape(fused, [-1, heads, 2 * width]), [width, width], axis=-1, _outputs=2
        )
        q = self._turned(op, self.q_norm(op, q), step.head_rope)
        k = self._turned(
            op, self.k_norm(op, op.Reshape(k, [-1, shared, width])), step.head_rope
        )
        flat = shared * width
        rows = {CacheKind.KEYS: op.Reshape(k, [-1, flat]), CacheKind.VALUES: v}
        written = {
            kind: self.ops.write_rows(op, caches[kind], step.plan.k_idxs, values, flat)
            for kind, values in rows.items()
        }
        columns, is_seen, indexed = self.indexer(op, x, step, sizes, caches)
        pick = self._gathered if self.select is Select.GATHER else self._masked
        mixed = pick(op, q, written, step, sizes, columns, is_seen)  # [T, H, hd]
        gated = op.Mul(mixed, op.Sigmoid(gate))
        return self.o_proj(op, op.Reshape(gated, [-1, heads * width])), written | indexed

    def _turned(self, op: OpBuilder, x: ir.Value, rope: RopeTable) -> ir.Value:
        return rotate_first(op, x, rope, self.config.head_dim)

    def _gathered(
        self,
        op: OpBuilder,
        q: ir.Value,
        written: Mapping[CacheKind, Stored],
        step: PooledStep,
        sizes: StepSizes,
        columns: ir.Value,
        is_seen: ir.Value,
    ) -> ir.Value:
        """Attention of each token to the rows that it chose and its tail: [T, H, hd]."""
        config = self.config
        pool, kept = config.index_ratio, config.top_pools
        chosen = op.Gather(step.members, op.Add(columns, step.starts), axis=0)  # [T, K, G]
        rows = op.Concat(
            op.Reshape(chosen, [-1, kept * pool]), step.plan.tail_idxs, axis=1
        )  # [T, n]
        bias = op.Unsqueeze(op.Where(is_seen, 0.0, MASKED), [-1])
        bias = op.Reshape(op.Expand(bias, [1, 1, pool]), [-1, kept * pool])
        bias = op.Concat(bias, step.tail_bias, axis=1)  # [T, n]
        count = kept * pool + pool - 1
        shared, width = config.num_kv_heads, config.head_dim
        keys, values = (
            op.Reshape(
                self.ops.read_rows(
                    op, written[kind], rows, shared * width, [-1, count, shared * width]
                ),
                [-1, count, shared, width],
            )
            for kind in (CacheKind.KEYS, CacheKind.VALUES)
        )
        grouped = op.Reshape(q, [-1, shared, config.num_heads // shared, width])
        scores = op.MatMul(grouped, op.Transpose(keys, perm=[0, 2, 3, 1]))  # [T, kv, g, n]
        scores = op.Add(op.Mul(scores, width**-0.5), op.Unsqueeze(bias, [1, 2]))
        weights = op.Softmax(scores, axis=-1)
        mixed = op.MatMul(weights, op.Transpose(values, perm=[0, 2, 1, 3]))
        return op.Reshape(mixed, [-1, config.num_heads, width])

    def _masked(
        self,
        op: OpBuilder,
        q: ir.Value,
        written: Mapping[CacheKind, Stored],
        step: PooledStep,
        sizes: StepSizes,
        columns: ir.Value,
        is_seen: ir.Value,
    ) -> ir.Value:
        """Attention to all exposed rows of a stream, those not chosen masked, and to the tail."""
        config = self.config
        pool, shared, width = config.index_ratio, config.num_kv_heads, config.head_dim
        heads = config.num_heads
        flat = shared * width
        grouped = op.Reshape(q, [-1, shared, heads // shared, width])
        lead = op.Concat(sizes.streams, [-1, flat], axis=0)
        split = op.Concat(sizes.streams, [-1, shared, width], axis=0)
        keys, values, late_keys, late_values = (
            op.Reshape(self.ops.read_rows(op, written[kind], rows, flat, size), shape)
            for rows, size, shape in (
                (step.plan.pool_idxs, lead, split),
                (step.plan.tail_idxs, [-1, pool - 1, flat], [-1, pool - 1, shared, width]),
            )
            for kind in (CacheKind.KEYS, CacheKind.VALUES)
        )
        # Exposed rows are shared by a stream: [S, kv, P*g, hd] against [S, kv, hd, NG*G].
        by_stream = op.Concat(sizes.streams, [-1, shared, heads // shared, width], axis=0)
        wide = op.Transpose(op.Reshape(grouped, by_stream), perm=[0, 2, 1, 3, 4])
        wide = op.Reshape(wide, op.Concat(sizes.streams, [shared, -1, width], axis=0))
        scores = op.MatMul(wide, op.Transpose(keys, perm=[0, 2, 3, 1]))
        num_rows = op.Mul(step.num_pools, [pool])
        back = op.Concat(sizes.streams, [shared, -1, heads // shared], num_rows, axis=0)
        scores = op.Transpose(op.Reshape(scores, back), perm=[0, 2, 1, 3, 4])
        per_token = op.Concat([-1, shared, heads // shared], num_rows, axis=0)
        scores = op.Reshape(scores, per_token)  # [T, kv, g, NG*G]
        bias = self._chosen_bias(op, step, sizes, columns, is_seen)
        late = op.MatMul(grouped, op.Transpose(late_keys, perm=[0, 2, 3, 1]))
        late = op.Add(op.Mul(late, width**-0.5), op.Unsqueeze(step.tail_bias, [1, 2]))
        scores = op.Add(op.Mul(scores, width**-0.5), op.Unsqueeze(bias, [1, 2]))
        weights = op.Softmax(op.Concat(scores, late, axis=-1), axis=-1)
        early, late = op.Split(
            weights, op.Concat(num_rows, [pool - 1], axis=0), axis=-1, _outputs=2
        )
        early = op.Reshape(
            early, op.Concat(sizes.streams, [-1, shared, heads // shared], num_rows, axis=0)
        )
        early = op.Reshape(
            op.Transpose(early, perm=[0, 2, 1, 3, 4]),
            op.Concat(sizes.streams, [shared, -1], num_rows, axis=0),
        )
        mixed = op.MatMul(early, op.Transpose(values, perm=[0, 2, 1, 3]))
        mixed = op.Reshape(
            mixed, op.Concat(sizes.streams, [shared, -1, heads // shared, width], axis=0)
        )
        mixed = op.Reshape(
            op.Transpose(mixed, perm=[0, 2, 1, 3, 4]), [-1, shared, heads // shared, width]
        )
        mixed = op.Add(mixed, op.MatMul(late, op.Transpose(late_values, perm=[0, 2, 1, 3])))
        return op.Reshape(mixed, [-1, heads, width])

    def _chosen_bias(
        self,
        op: OpBuilder,
        step: PooledStep,
        sizes: StepSizes,
        columns: ir.Value,
        is_seen: ir.Value,
    ) -> ir.Value:
        """0 for the members of chosen pools that a token sees, else MASKED: [T, NG*G]."""
        shape = op.Concat(sizes.tokens, step.num_pools, axis=0)
        picked = op.ScatterElements(
            op.Expand(MASKED, shape), columns, op.Where(is_seen, 0.0, MASKED), axis=-1
        )
        wide = op.Expand(op.Unsqueeze(picked, [-1]), [1, 1, self.config.index_ratio])
        return op.Reshape(
            wide, op.Concat([-1], op.Mul(step.num_pools, [self.config.index_ratio]), axis=0)
        )
