"""Values that all layers of a step share: plan inputs, sizes, rotary tables and masks.

Computed once per step. Masks come from counts; the host never fills one. Dim letters are those of
models/planner_specs.py; M is the number of residual streams of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder

from cachegraph.graphgen.layers.masks import MASKED
from cachegraph.graphgen.layers.ranges import iota
from cachegraph.graphgen.layers.rope import RopeTable, half_rotation_matrix
from cachegraph.models.pooled_fields import PooledFields, pooled_name
from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig
from cachegraph.models.qwen4_exp.rope import frequency_matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledStep:
    """Shared values of the layers that attend.

    visible [S, P, NG]: whether a token sees a pool. members [S*NG, G]: rows of each pool's members.
    tail_bias [T, G-1]: 0 for rows of a token's tail, else MASKED. starts [T, 1]: the first pool of
    a token's stream among those of all. ropes: at the tokens [T, rope], at new pools [BG, rope].
    """

    plan: PooledFields[ir.Value]
    visible: ir.Value
    members: ir.Value
    tail_bias: ir.Value
    starts: ir.Value
    num_pools: ir.Value  # [1]: NG
    token_rope: RopeTable
    head_rope: RopeTable
    pool_rope: RopeTable


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """Sizes of a step, each int64 [1]."""

    streams: ir.Value  # S
    tokens: ir.Value  # T


def step_sizes(op: OpBuilder, tokens: ir.Value) -> StepSizes:
    """Sizes from the graph input `tokens` [S, P]."""
    size = op.Shape(tokens)
    return StepSizes(
        streams=op.Shape(tokens, start=0, end=1),
        tokens=op.ReduceProd(size, [0], keepdims=1),
    )


def pooled_step(
    op: OpBuilder,
    config: Qwen4ExpConfig,
    inputs: Mapping[str, ir.Value],
    sizes: StepSizes,
) -> PooledStep:
    """Emit the shared values of the layers that attend, from the graph inputs by contract name."""
    plan = PooledFields(*(inputs[pooled_name(field)] for field in PooledFields._fields))
    num_pools = op.Shape(plan.pool_cells, start=1, end=2)
    frequencies = _constant(op, frequency_matrix(config), "rope_frequencies")
    rotation = _constant(op, half_rotation_matrix(config.rotary_dim), "rope_rotation")
    by_stream = op.Concat(sizes.streams, [-1, 1], axis=0)
    counts = op.Reshape(plan.n_visible, by_stream)  # [S, P, 1]
    is_tail = op.Less(
        _constant(op, np.arange(config.index_ratio - 1), "tail_columns"),
        op.Unsqueeze(plan.n_tail, [-1]),
    )
    streams = op.Mul(iota(op, sizes.streams), num_pools)  # [S]
    per_token = op.Add(
        op.Mul(counts, 0), op.Unsqueeze(streams, [1, 2])
    )  # [S, P, 1], whose P is symbolic
    tokens = _rope_table(op, inputs["positions"], frequencies, rotation, config)
    return PooledStep(
        plan=plan,
        visible=op.Less(iota(op, num_pools), counts),
        members=op.Reshape(plan.pool_idxs, [-1, config.index_ratio]),
        tail_bias=op.Where(is_tail, 0.0, MASKED),
        starts=op.Reshape(per_token, [-1, 1]),
        num_pools=num_pools,
        token_rope=tokens,
        head_rope=tokens.per_head(op),
        pool_rope=_rope_table(op, plan.new_pool_pos, frequencies, rotation, config),
    )


def _rope_table(
    op: OpBuilder,
    places: ir.Value,
    frequencies: ir.Value,
    rotation: ir.Value,
    config: Qwen4ExpConfig,
) -> RopeTable:
    """Cos and sin in f32 at positions [..., 3]: each frequency turns with one of the three."""
    flat = op.Cast(op.Reshape(places, [-1, 3]), to=ir.DataType.FLOAT)
    angles = op.MatMul(flat, frequencies)  # [n, 3] x [3, rope]
    return RopeTable(op.Cos(angles), op.Sin(angles), rotation, config.rotary_dim)


def _constant(op: OpBuilder, array: NDArray[np.generic], name: str) -> ir.Value:
    return op.initializer(ir.tensor(array, name=name))
