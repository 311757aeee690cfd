"""Attention of one layer: window rows, compressed rows and the sink in one softmax.

K = V: a raw or compressed row serves as both, so RoPE is undone on the output. Cached rows are read
only from the written caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.cache_ops import CacheOps, Stored
from cachegraph.graphgen.deepseek_v4.compressor import Compressor
from cachegraph.graphgen.deepseek_v4.indexer import Indexer
from cachegraph.graphgen.deepseek_v4.output import GroupedOutput
from cachegraph.graphgen.deepseek_v4.step import CompressorStep, StepValues
from cachegraph.graphgen.layers.linear import FloatLinear, Matrix, linear
from cachegraph.graphgen.layers.masks import MASKED
from cachegraph.graphgen.layers.norm import RMSNorm, rms_norm
from cachegraph.graphgen.layers.rope import rotate
from cachegraph.graphgen.weights.parameter import Read, vector
from cachegraph.models.contract import CacheKind
from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind
from cachegraph.models.deepseek_v4.contract import cache_width, state_kind
from cachegraph.models.export_options import ExportOptions, Select

Caches = dict[CacheKind, Stored]
_COMPRESSED = {
    LayerKind.WINDOW: (),
    LayerKind.CSA: (CacheKind.CSA, CacheKind.LID),
    LayerKind.HCA: (CacheKind.HCA,),
}
_COMPRESSOR_PATH = {
    CacheKind.CSA: "compressor",
    CacheKind.HCA: "compressor",
    CacheKind.LID: "indexer.compressor",
}


@dataclass(frozen=True, slots=True)
class _Source:
    """Rows that queries attend to: [S, n, hd] shared by a stream, or [T, n, hd].

    bias: added to the scores, broadcast to [T, H, n]. size: n, a list or an int64 vector [1].
    """

    rows: ir.Value
    bias: ir.Value
    size: ir.Value | list[int]
    is_shared: bool


class Attention(nn.Module):
    """One layer's attention. `prefix` is the checkpoint path, such as layers.3.attn."""

    def __init__(
        self, config: DeepseekV4Config, kind: LayerKind, prefix: str, options: ExportOptions
    ) -> None:
        super().__init__()
        self.config, self.kind, self.select = config, kind, options.select
        self.ops = CacheOps(read=options.gather, write=options.scatter)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.wqkv_a = linear(
            [f"{prefix}.wq_a.weight", f"{prefix}.wkv.weight"],
            hidden,
            config.q_lora_rank + config.head_dim,
            options,
        )
        self.q_norm = RMSNorm(vector(f"{prefix}.q_norm.weight", config.q_lora_rank), eps)
        self.kv_norm = RMSNorm(vector(f"{prefix}.kv_norm.weight", config.head_dim), eps)
        heads = config.num_heads * config.head_dim
        self.wq_b = linear([f"{prefix}.wq_b.weight"], config.q_lora_rank, heads, options)
        self.attn_sink = vector(f"{prefix}.attn_sink", config.num_heads)
        self.output = GroupedOutput(config, prefix, options)
        self._add_compressors(prefix)

    def _add_compressors(self, prefix: str) -> None:
        """Compressors of the layer, and one fused float projection for all that they read."""
        self.part_sizes: list[int] = []
        names: list[str] = []
        self.compressors: dict[CacheKind, Compressor] = {}
        for kind in _COMPRESSED[self.kind]:
            path = f"{prefix}.{_COMPRESSOR_PATH[kind]}"
            self.compressors[kind] = Compressor(self.config, kind, path, self.ops)
            setattr(self, f"{kind.value}_compressor", self.compressors[kind])
            names += [f"{path}.wkv.weight", f"{path}.wgate.weight"]
            self.part_sizes.append(cache_width(self.config, state_kind(kind)))
        if self.kind is LayerKind.CSA:
            self.indexer = Indexer(self.config, f"{prefix}.indexer", self.ops)
            self.part_sizes.append(self.config.index_heads)
        if names:
            matrix = _compressor_matrix(self.config, names, prefix, self.kind)
            size = sum(self.part_sizes)
            self.compressor_in = FloatLinear(matrix, self.config.hidden_size, size)

    def forward(
        self,
        op: OpBuilder,
        x: ir.Value,
        values: StepValues,
        caches: Mapping[CacheKind, Stored],
    ) -> tuple[ir.Value, Caches]:
        """x [T, D] -> output [T, D] and the layer's updated caches by kind."""
        config, ropes = self.config, values.ropes[self.kind]
        sizes = [config.q_lora_rank, config.head_dim]
        low_rank, kv = op.Split(self.wqkv_a(op, x), sizes, axis=-1, _outputs=2)
        low_rank = self.q_norm(op, low_rank)
        kv = rotate(op, self.kv_norm(op, kv), ropes.rows, config.head_dim)
        written: Caches = {
            CacheKind.RAW: self.ops.write_rows(
                op, caches[CacheKind.RAW], values.raw.write_idxs, kv, config.head_dim
            )
        }
        parts = self._project(op, x)
        for kind, part in zip(self.compressors, parts, strict=False):
            step = values.compressors[CacheKind.CSA if kind is CacheKind.LID else kind]
            written |= self.compressors[kind](op, part, step, caches)
        columns = None
        if self.kind is LayerKind.CSA:
            columns = self.indexer(
                op,
                low_rank,
                parts[-1],
                written[CacheKind.LID],
                values,
                values.compressors[CacheKind.CSA],
            )
        q = self._queries(op, low_rank, values)
        mixed = self._attend(op, q, values, written, columns)
        mixed = rotate(op, mixed, ropes.undo, config.head_dim)
        return self.output(op, mixed), written

    def _project(self, op: OpBuilder, x: ir.Value) -> tuple[ir.Value, ...]:
        if not self.part_sizes:
            return ()
        fused = self.compressor_in(op, x)
        if len(self.part_sizes) == 1:
            return (fused,)
        count = len(self.part_sizes)
        return tuple(op.Split(fused, self.part_sizes, axis=-1, _outputs=count))

    def _queries(self, op: OpBuilder, low_rank: ir.Value, values: StepValues) -> ir.Value:
        """Rotated queries [T, H, head_dim], unweighted RMS per head, already scaled.

        The softmax scale is the norm's weight, since RoPE is linear.
        """
        config = self.config
        q = op.Reshape(self.wq_b(op, low_rank), [-1, config.num_heads, config.head_dim])
        scale = [config.head_dim**-0.5] * config.head_dim
        q = rms_norm(op, q, scale, config.rms_norm_eps)
        return rotate(op, q, values.ropes[self.kind].heads, config.head_dim)

    def _attend(
        self,
        op: OpBuilder,
        q: ir.Value,
        values: StepValues,
        written: Mapping[CacheKind, Stored],
        columns: ir.Value | None,
    ) -> ir.Value:
        """softmax([window | compressed | sink]) over the rows, their weighted sum: [T, H, hd]."""
        width = self.config.head_dim
        lead = op.Concat(values.num_streams, [-1, width], axis=0)
        raw = self.ops.read_rows(
            op, written[CacheKind.RAW], values.raw.read_idxs, width, lead
        )  # [S, W, hd]
        sources = [_Source(raw, values.raw_bias, values.num_raw, True)]
        if self.kind is LayerKind.HCA:
            bias = op.Unsqueeze(values.compressors[CacheKind.HCA].bias, [1])
            sources.append(self._shared(op, CacheKind.HCA, bias, values, written))
        if columns is not None:
            pick = self._gathered if self.select is Select.GATHER else self._masked
            sources.append(pick(op, columns, values, written))
        scores = [
            op.Add(self._scores(op, q, source, values), source.bias) for source in sources
        ]
        sink = op.Add(values.zero_column, op.Unsqueeze(self.attn_sink, [0, -1]))  # [T, H, 1]
        weights = op.Softmax(op.Concat(*scores, sink, axis=-1), axis=-1)
        sizes = op.Concat(*[source.size for source in sources], [1], axis=0)
        split = op.Split(weights, sizes, axis=-1, _outputs=len(sources) + 1)
        outputs = [
            self._weighted(op, part, source, values)
            for part, source in zip(split, sources, strict=False)
        ]
        return outputs[0] if len(outputs) == 1 else op.Add(*outputs)

    def _scores(
        self, op: OpBuilder, q: ir.Value, source: _Source, values: StepValues
    ) -> ir.Value:
        """q [T, H, hd] against the rows of a source: [T, H, n]."""
        keys = op.Transpose(source.rows, perm=[0, 2, 1])
        if not source.is_shared:
            return op.MatMul(q, keys)
        by_stream = op.Concat(values.num_streams, [-1, self.config.head_dim], axis=0)
        scores = op.MatMul(op.Reshape(q, by_stream), keys)  # [S, P*H, n]
        return op.Reshape(scores, op.Concat([-1, self.config.num_heads], source.size, axis=0))

    def _weighted(
        self, op: OpBuilder, weights: ir.Value, source: _Source, values: StepValues
    ) -> ir.Value:
        """weights [T, H, n] over the rows of a source: [T, H, hd]."""
        if not source.is_shared:
            return op.MatMul(weights, source.rows)
        by_stream = op.Concat(values.num_streams, [-1], source.size, axis=0)
        mixed = op.MatMul(op.Reshape(weights, by_stream), source.rows)  # [S, P*H, hd]
        return op.Reshape(mixed, [-1, self.config.num_heads, self.config.head_dim])

    def _shared(
        self,
        op: OpBuilder,
        kind: CacheKind,
        bias: ir.Value,
        values: StepValues,
        written: Mapping[CacheKind, Stored],
    ) -> _Source:
        """All exposed rows of a kind, [S, n, hd], with a bias [T, 1, n]."""
        step, width = values.compressors[kind], self.config.head_dim
        lead = op.Concat(values.num_streams, [-1, width], axis=0)
        rows = self.ops.read_rows(op, written[kind], step.plan.rows, width, lead)
        return _Source(rows, bias, step.num_exposed, True)

    def _gathered(
        self,
        op: OpBuilder,
        columns: ir.Value,
        values: StepValues,
        written: Mapping[CacheKind, Stored],
    ) -> _Source:
        """The chosen rows of each token, [T, K, hd]; row numbers come from the plan's row table."""
        step, topk = values.compressors[CacheKind.CSA], self.config.index_topk
        by_stream = op.Concat(values.num_streams, [-1], axis=0)
        table = op.GatherElements(
            step.plan.rows, op.Reshape(columns, by_stream), axis=1
        )  # [S, N] at [S, P*K]
        row_numbers = op.Reshape(table, [-1, topk])
        width = self.config.head_dim
        rows = self.ops.read_rows(
            op, written[CacheKind.CSA], row_numbers, width, [-1, topk, width]
        )
        return _Source(rows, self._chosen_bias(op, columns, step), [topk], False)

    def _chosen_bias(self, op: OpBuilder, columns: ir.Value, step: CompressorStep) -> ir.Value:
        """A token with fewer visible rows than K chose invisible ones too: mask them. [T, 1, K]."""
        visible = op.Less(columns, op.Unsqueeze(step.plan.n_visible, [-1]))
        return op.Unsqueeze(op.Where(visible, 0.0, MASKED), [1])

    def _masked(
        self,
        op: OpBuilder,
        columns: ir.Value,
        values: StepValues,
        written: Mapping[CacheKind, Stored],
    ) -> _Source:
        """All exposed rows, with the rows that were not chosen masked."""
        step = values.compressors[CacheKind.CSA]
        shape = op.Concat(values.num_tokens, step.num_exposed, axis=0)
        base = op.Expand(MASKED, shape)
        chosen = op.ScatterElements(
            base, columns, op.Mul(op.Cast(columns, to=1), 0.0), axis=-1
        )
        bias = op.Unsqueeze(op.Add(chosen, step.bias), [1])
        return self._shared(op, CacheKind.CSA, bias, values, written)


def _compressor_matrix(
    config: DeepseekV4Config, names: list[str], prefix: str, kind: LayerKind
) -> Matrix:
    """The fused [out, hidden] projection: [kv | score] of each compressor, then head weights.

    The indexer's scales (1/sqrt(heads) and 1/sqrt(head size)) are folded into its head weights.
    """

    def matrix(read: Read) -> NDArray[np.float32]:
        parts = [read(name) for name in names]
        if kind is LayerKind.CSA:
            scale = np.float32((config.index_heads * config.index_head_dim) ** -0.5)
            parts.append(read(f"{prefix}.indexer.weights_proj.weight") * scale)
        return np.concatenate(parts)

    return matrix
