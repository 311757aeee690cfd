"""The n-gram embedding of a layer: hashed n-grams, looked up and added to the residual streams.

Equations: specs of Qwen4-Exp, "PLE". The host hashes; the graph gets numbers of table rows, or the
rows themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.cache_ops import CacheOps, Stored
from cachegraph.graphgen.layers.causal_conv import CausalConv, ConvSizes, ConvStep
from cachegraph.graphgen.layers.linear import FLOAT_TYPES, as_float, joined, linear
from cachegraph.graphgen.layers.state_step import StateStep
from cachegraph.graphgen.qwen4_exp.hyper import GroupedNorm
from cachegraph.graphgen.weights.parameter import Piece, Read, Recipe, Weight
from cachegraph.models.export_options import ExportOptions, WeightType
from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig
from cachegraph.models.qwen4_exp.tensors import ngram_shards

_LEAST = 1e-6  # of the absolute match whose root is taken


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramStep:
    """Shared values: states and convolution of a step, and what the host looked up.

    ids [T, heads of all modules], or rows [T, modules * E] where the host holds the tables.
    """

    states: StateStep
    conv: ConvStep
    ids: ir.Value | None
    rows: ir.Value | None


def conv_sizes(config: Qwen4ExpConfig) -> ConvSizes:
    """The dilated convolution over the values of earlier tokens."""
    return ConvSizes(
        channels=config.stream_width,
        kernel=config.ple_conv_kernel,
        dilation=config.ngram_size,
    )


def table_form(options: ExportOptions) -> WeightType:
    """How tables are stored: in the float form chosen; beside quantised matrices as published."""
    return WeightType.BF16 if options.weights.bits else options.weights


def table_weight(config: Qwen4ExpConfig, module: int, form: WeightType) -> Weight:
    """The table [rows, width of a head] of a module, made one part of the checkpoint at a time."""
    layer = config.ple_layers[module]

    def make(read: Read) -> Iterator[Piece]:
        start = 0
        for shard in ngram_shards(config, layer):
            rows = read(shard)
            yield Piece("table", start, rows)
            start += len(rows)

    shape = [config.ngram_rows(module), config.ngram_head_dim]
    return Recipe(make).weight("table", shape, FLOAT_TYPES[form])


class NgramTable(nn.Module):
    """A table that the graph holds; gathered rows are cast."""

    def __init__(self, config: Qwen4ExpConfig, module: int, options: ExportOptions) -> None:
        super().__init__()
        self.heads = config.ngram_total_heads
        self.first, self.width = module * self.heads, config.ple_embed_dim
        self.form = table_form(options)
        self.table = table_weight(config, module, self.form)

    def forward(self, op: OpBuilder, ids: ir.Value) -> ir.Value:
        """ids [T, heads of all modules] -> the rows of this module's heads, [T, E]."""
        own = op.Slice(ids, [self.first], [self.first + self.heads], [1])
        rows = as_float(op, op.Gather(self.table, own, axis=0), self.form)
        return op.Reshape(rows, [-1, self.width])


class NgramEmbedding(nn.Module):
    """One layer's n-gram embedding, number `module` of the model."""

    def __init__(
        self, config: Qwen4ExpConfig, layer: int, options: ExportOptions, *, host_tables: bool
    ) -> None:
        super().__init__()
        self.config, self.sizes = config, conv_sizes(config)
        self.ops = CacheOps(read=options.gather, write=options.scatter)
        self.module = config.ple_layers.index(layer)
        prefix, width = f"layers.{layer}.ple", config.ple_embed_dim
        if not host_tables:
            self.ple_embedding = NgramTable(config, self.module, options)
        self.key_proj = linear(
            [f"{prefix}.key_proj.weight"], width, config.stream_width, options
        )
        self.value_proj = linear(
            [f"{prefix}.value_proj.weight"], width, config.hidden_size, options
        )
        self.norm_key = GroupedNorm(config, f"{prefix}.norm_key.weight")
        self.norm_query = GroupedNorm(config, f"{prefix}.norm_query.weight")
        self.norm_conv = GroupedNorm(config, f"{prefix}.norm_conv.weight")
        self.conv1d = CausalConv(joined([f"{prefix}.conv1d.weight"]), self.sizes, silu=True)

    def forward(
        self, op: OpBuilder, streams: ir.Value, step: NgramStep, cache: Stored
    ) -> tuple[ir.Value, Stored]:
        """streams [T, M, D] -> streams with the embedding added, and the written history."""
        config = self.config
        m, d = config.hc_count, config.hidden_size
        embedded = self._embedded(op, step)
        keys = self.norm_key(op, op.Reshape(self.key_proj(op, embedded), [-1, m, d]))
        match = op.ReduceSum(
            op.Mul(keys, self.norm_query(op, streams)), [-1], keepdims=1
        )  # [T, M, 1]
        match = op.Mul(match, d**-0.5)
        root = op.Sqrt(op.Max(op.Abs(match), _LEAST))
        gate = op.Sigmoid(op.Mul(op.Sign(match), root))
        value = op.Mul(gate, op.Unsqueeze(self.value_proj(op, embedded), [1]))  # [T, M, D]
        states, width = step.states, self.sizes.width
        by_stream = op.Concat(states.num_streams, [-1, m * d], axis=0)
        history = self.ops.read_rows(
            op, cache, states.plan.state_read_idxs, width, [-1, width]
        )
        normed = op.Reshape(self.norm_conv(op, value), by_stream)
        mixed, kept = self.conv1d(op, normed, history, step.conv)
        written = self.ops.write_rows(op, cache, states.kept_rows, kept, width)
        added = op.Add(value, op.Reshape(mixed, [-1, m, d]))
        return op.Add(streams, added), written

    def _embedded(self, op: OpBuilder, step: NgramStep) -> ir.Value:
        """The rows of all heads, [T, E]."""
        if step.rows is None:
            return self.ple_embedding(op, step.ids)
        width = self.config.ple_embed_dim
        first = self.module * width
        return op.Slice(step.rows, [first], [first + width], [1])
