"""Unit lower triangular systems of as many rows as a step has tokens, without a loop.

The inverse is grown from blocks of 1 row: two inverted neighbours X and a block N below them give
the inverse of twice the size, X - X N X. Powers of N, which a plain series would need, grow like
binomials where keys repeat and lose every digit; inverses of blocks do not. Steps longer than BLOCK
are cut into blocks, and the blocks solved for by fixed-point iteration, exact after one round per
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder

from cachegraph.graphgen.layers.state_step import iota

BLOCK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """How a step longer than BLOCK is cut: n blocks of C rows, the last one padded.

    square, rows: Pad amounts of [Z, P, P] and [Z, P, d]. same [n*C, n*C]: 1 inside a block.
    by_block: shape [-1, C, n, C]. wide: [-1, C, n*C]. whole: [-1, n*C, n*C]. size: [1] C.
    """

    square: ir.Value
    rows: ir.Value
    same: ir.Value
    by_block: ir.Value
    wide: ir.Value
    whole: ir.Value
    size: ir.Value
    padded: ir.Value
    num_steps: ir.Value
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Triangle:
    """Shared values of the systems of one step.

    levels: f32 [C, C] each; level l holds the pairs of rows first joined in a block of 2^(l+1).
    identity [C, C].
    """

    levels: Sequence[ir.Value]
    identity: ir.Value
    blocks: Blocks | None


def triangle(op: OpBuilder, num_steps: ir.Value, max_step: int) -> Triangle:
    """Emit the masks for systems of num_steps [1] rows, at most `max_step`."""
    largest = min(max_step, BLOCK)
    size = num_steps if max_step <= BLOCK else op.Min(num_steps, [BLOCK])
    table = op.initializer(ir.tensor(join_levels(largest), name="triangle_levels"))
    ends = op.Concat(size, size, axis=0)
    table = op.Slice(table, [0, 0], ends, [0, 1])  # [C, C]
    depth = ceil(log2(largest))
    return Triangle(
        levels=[
            op.Cast(op.Equal(table, level), to=ir.DataType.FLOAT)
            for level in range(1, depth + 1)
        ],
        identity=op.Cast(op.Equal(table, 0), to=ir.DataType.FLOAT),
        blocks=_blocks(op, num_steps, size, max_step) if max_step > BLOCK else None,
    )


def join_levels(size: int) -> NDArray[np.int64]:
    """[size, size]: below the diagonal the level that joins two rows, 0 on it, -1 above."""
    row, column = np.indices((size, size))
    joined = np.zeros((size, size), np.int64)
    for level in range(1, size.bit_length() + 1):
        joined[(row >> (level - 1)) != (column >> (level - 1))] = level
    return np.where(row < column, -1, joined)


def _blocks(
    op: OpBuilder, num_steps: ir.Value, size: ir.Value, max_step: int
) -> Blocks:
    count = op.Div(op.Sub(op.Add(num_steps, size), [1]), size)  # ceil(P / C)
    padded = op.Mul(count, size)
    more = op.Sub(padded, num_steps)
    number = op.Div(iota(op, padded), size)  # block of each row
    same = op.Equal(op.Unsqueeze(number, [1]), number)
    return Blocks(
        square=op.Concat([0, 0, 0, 0], more, more, axis=0),
        rows=op.Concat([0, 0, 0, 0], more, [0], axis=0),
        same=op.Cast(same, to=ir.DataType.FLOAT),
        by_block=op.Concat([-1], size, count, size, axis=0),
        wide=op.Concat([-1], size, padded, axis=0),
        whole=op.Concat([-1], padded, padded, axis=0),
        size=size,
        padded=padded,
        num_steps=num_steps,
        rounds=ceil(max_step / BLOCK) - 1,
    )


def solve(
    op: OpBuilder, lower: ir.Value, rows: ir.Value, width: int, step: Triangle
) -> ir.Value:
    """x with x + N x = rows, where N is `lower` [Z, P, P] below its diagonal; rows [Z, P, width].

    What `lower` holds on the diagonal is not used; above it there must be zeros.
    """
    blocks = step.blocks
    if blocks is None:
        return op.MatMul(_inverse(op, lower, step), rows)
    lower = op.Pad(lower, blocks.square)  # [Z, n*C, n*C]
    near = op.Mul(lower, blocks.same)
    inner = op.ReduceSum(op.Reshape(near, blocks.by_block), [2], keepdims=0)  # [Z*n, C, C]
    inverse = _inverse(op, inner, step)
    far = op.MatMul(inverse, op.Reshape(op.Sub(lower, near), blocks.wide))
    far = op.Reshape(far, blocks.whole)
    short = op.Concat([-1], blocks.size, [width], axis=0)
    rows = op.Reshape(op.Pad(rows, blocks.rows), short)
    long = op.Concat([-1], blocks.padded, [width], axis=0)
    first = op.Reshape(op.MatMul(inverse, rows), long)
    found = first
    for _ in range(blocks.rounds):
        found = op.Sub(first, op.MatMul(far, found))
    return op.Slice(found, [0], blocks.num_steps, [1])


def _inverse(op: OpBuilder, lower: ir.Value, step: Triangle) -> ir.Value:
    """The inverse of I + the part of `lower` [n, C, C] below its diagonal."""
    if not step.levels:
        return op.Add(op.Mul(lower, 0.0), step.identity)
    first, *others = step.levels
    found = op.Sub(step.identity, op.Mul(lower, first))
    for level in others:
        joined = op.MatMul(op.Mul(lower, level), found)
        found = op.Sub(found, op.MatMul(found, joined))
    return found
