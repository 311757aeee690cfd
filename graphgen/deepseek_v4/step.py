"""Values that all layers of a step share: plan inputs, sizes, rotary tables and masks.

Computed once per step. Masks come from counts and positions; the host never fills one.
Dim letters are those of models/deepseek_v4/contract.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder

from cachegraph.graphgen.layers.masks import MASKED
from cachegraph.graphgen.layers.ranges import iota
from cachegraph.graphgen.layers.rope import RopeTable, rope_table, rotation_matrix
from cachegraph.models.contract import CacheKind
from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind
from cachegraph.models.deepseek_v4.contract import (
    compressor_kinds,
    is_overlapping,
    window_rows,
)
from cachegraph.models.deepseek_v4.rope import inverse_frequencies
from cachegraph.models.plan_fields import CompressorFields, RawFields, plan_name


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSet:
    """The tables of one RoPE kind at the tokens' positions."""

    rows: RopeTable  # [T, rope]
    heads: RopeTable  # [T, 1, rope]
    undo: RopeTable  # [T, 1, rope], opposite turn


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorStep:
    """Shared values of one compressor kind.

    kv_idxs, score_idxs [B, window]: rows of the source table cut into head-wide parts.
    block_rope [B, rope]. bias [T, n]: 0 where a token may see an exposed row, else MASKED.
    """

    plan: CompressorFields[ir.Value]
    kv_idxs: ir.Value
    score_idxs: ir.Value
    block_rope: RopeTable
    bias: ir.Value
    num_exposed: ir.Value  # [1]: N, or NH


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValues:
    """Everything that the layers of one step share."""

    tokens: ir.Value  # [T]
    num_streams: ir.Value  # [1]: S
    num_tokens: ir.Value  # [1]: T
    raw: RawFields[ir.Value]
    raw_bias: ir.Value  # [T, 1, W]
    num_raw: ir.Value  # [1]: W
    zero_column: ir.Value  # [T, H, 1]
    ropes: Mapping[LayerKind, RopeSet]
    compressors: Mapping[CacheKind, CompressorStep]


def emit_step(
    op: OpBuilder, config: DeepseekV4Config, inputs: Mapping[str, ir.Value], pinned: int = 0
) -> StepValues:
    """Emit the shared values from the graph inputs, by contract name.

    pinned: first positions that every later token sees beside its window.
    """
    tokens = op.Reshape(inputs["tokens"], [-1])  # [S, P] -> [T]
    positions = op.Reshape(inputs["positions"], [-1])
    size = op.Shape(inputs["tokens"])
    num_tokens = op.ReduceProd(size, [0], keepdims=1)
    raw = RawFields(*(inputs[plan_name(CacheKind.RAW, f)] for f in RawFields._fields))
    num_raw = op.Shape(raw.read_idxs, start=1, end=2)
    rotation = _constant(op, rotation_matrix(config.rope_head_dim), "rope_rotation")
    frequencies = _frequencies(op, config)
    zeros = op.Expand(0.0, op.Concat(num_tokens, [config.num_heads, 1], axis=0))
    return StepValues(
        tokens=tokens,
        num_streams=op.Shape(inputs["tokens"], start=0, end=1),
        num_tokens=num_tokens,
        raw=raw,
        raw_bias=_raw_bias(
            op, (config.sliding_window, pinned), inputs["positions"], raw, num_raw
        ),
        num_raw=num_raw,
        zero_column=zeros,
        ropes=_rope_sets(op, config, positions, frequencies, rotation),
        compressors={
            kind: _compressor_step(op, config, kind, inputs, frequencies, rotation)
            for kind in compressor_kinds(config)
        },
    )


def _constant(op: OpBuilder, array: np.ndarray, name: str) -> ir.Value:
    return op.initializer(ir.tensor(array, name=name))


def _frequencies(op: OpBuilder, config: DeepseekV4Config) -> dict[LayerKind, ir.Value]:
    """[1, rope] inverse frequencies of each layer kind, shared where the RoPE is the same."""
    by_rope = {}
    ropes = dict.fromkeys(config.rope(kind) for kind in config.layer_kinds)
    for number, rope in enumerate(ropes):
        pairs = inverse_frequencies(rope, config.rope_head_dim)
        name = f"rope_frequencies_{number}"
        by_rope[rope] = _constant(op, np.repeat(pairs, 2)[None, :], name)
    return {kind: by_rope[config.rope(kind)] for kind in dict.fromkeys(config.layer_kinds)}


def _rope_sets(
    op: OpBuilder,
    config: DeepseekV4Config,
    positions: ir.Value,
    frequencies: Mapping[LayerKind, ir.Value],
    rotation: ir.Value,
) -> dict[LayerKind, RopeSet]:
    by_frequencies: dict[ir.Value, RopeSet] = {}
    for values in frequencies.values():
        if values not in by_frequencies:
            rows = rope_table(op, positions, values, rotation, config.rope_head_dim)
            heads = rows.per_head(op)
            by_frequencies[values] = RopeSet(rows=rows, heads=heads, undo=heads.inverse(op))
    return {kind: by_frequencies[values] for kind, values in frequencies.items()}


def _raw_bias(
    op: OpBuilder,
    window_and_pinned: tuple[int, int],
    positions: ir.Value,
    raw: RawFields[ir.Value],
    num_raw: ir.Value,
) -> ir.Value:
    """0 for rows that a token sees and that its stream's count covers, else MASKED: [T, 1, W].

    A token sees its window, and the pinned positions up to its own.
    """
    window, pinned = window_and_pinned
    query = op.Unsqueeze(positions, [-1])  # [S, P, 1]
    key = op.Unsqueeze(raw.read_pos, [1])  # [S, 1, W]
    near = op.Greater(key, op.Sub(query, window))
    if pinned:
        near = op.Or(near, op.Less(key, pinned))
    live = op.Less(
        iota(op, num_raw), op.Unsqueeze(raw.read_counts, [-1, -2])
    )  # [W] < [S, 1, 1]
    seen = op.And(op.And(op.LessOrEqual(key, query), near), live)  # [S, P, W]
    shape = op.Concat([-1, 1], num_raw, axis=0)
    return op.Reshape(op.Where(seen, 0.0, MASKED), shape)


def _compressor_step(
    op: OpBuilder,
    config: DeepseekV4Config,
    kind: CacheKind,
    inputs: Mapping[str, ir.Value],
    frequencies: Mapping[LayerKind, ir.Value],
    rotation: ir.Value,
) -> CompressorStep:
    names = (plan_name(kind, field) for field in CompressorFields._fields)
    plan = CompressorFields(*(inputs[name] for name in names))
    window = window_rows(config, kind)
    parts = 4 if is_overlapping(kind) else 2  # kv (and score) of a row are 2 or 1 heads wide
    half = window // 2 if is_overlapping(kind) else window
    first = np.array([0] * half + [1] * (window - half), np.int64)[None, :]
    kv_idxs = op.Add(
        op.Mul(plan.state_read_idxs, parts), _constant(op, first, f"{kind.value}_parts")
    )
    num_exposed = op.Shape(plan.rows, start=1, end=2)
    visible = op.Less(iota(op, num_exposed), op.Unsqueeze(plan.n_visible, [-1]))
    return CompressorStep(
        plan=plan,
        kv_idxs=kv_idxs,
        score_idxs=op.Add(kv_idxs, parts // 2),
        block_rope=rope_table(
            op,
            plan.state_write_pos,
            frequencies[LayerKind(kind.value)],
            rotation,
            config.rope_head_dim,
        ),
        bias=op.Where(visible, 0.0, MASKED),
        num_exposed=num_exposed,
    )
