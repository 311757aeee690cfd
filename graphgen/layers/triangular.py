"""Unit lower triangular systems with a row for each token of a step, solved without a loop.

The inverse grows from single rows: where X holds the inverses of two neighbouring blocks and N what
joins them, X - X N X holds that of the block of both. The plain series of powers of N takes fewer
products, but its terms grow like binomials where keys repeat, and cancel to nothing. Steps longer
than BLOCK are cut, and the blocks found by repetition: each round makes one more of them exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder

from cachegraph.graphgen.layers.ranges import iota

BLOCK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """How steps longer than BLOCK are cut: n blocks of C rows, the last one padded.

    square, tall: pads of [Z, P, P] and [Z, P, d]. near [n*C, n*C]: 1 inside a block. by_block,
    wide, whole: shapes [-1, C, n, C], [-1, C, n*C] and [-1, n*C, n*C].
    """

    square: ir.Value
    tall: ir.Value
    near: ir.Value
    by_block: ir.Value
    wide: ir.Value
    whole: ir.Value
    size: ir.Value  # [1]: C
    padded: ir.Value  # [1]: n*C
    num_steps: ir.Value  # [1]: P
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Triangle:
    """Shared values of the systems of one step.

    levels: masks [C, C]; the first joins rows in pairs, each further one blocks of twice the size.
    identity [C, C].
    """

    levels: tuple[ir.Value, ...]
    identity: ir.Value
    blocks: Blocks | None


def triangle(op: OpBuilder, num_steps: ir.Value, max_step: int) -> Triangle:
    """Emit the shared values for systems of num_steps [1] rows, `max_step` at most."""
    largest = min(max_step, BLOCK)
    size = num_steps if max_step <= BLOCK else op.Min(num_steps, [BLOCK])
    levels = op.initializer(ir.tensor(join_levels(largest), name="triangle_levels"))
    levels = op.Slice(levels, [0, 0], op.Concat(size, size, axis=0), [0, 1])  # [C, C]

    def mask(level: int) -> ir.Value:
        return op.Cast(op.Equal(levels, level), to=ir.DataType.FLOAT)

    return Triangle(
        levels=tuple(mask(level) for level in range(1, (largest - 1).bit_length() + 1)),
        identity=mask(0),
        blocks=_blocks(op, num_steps, size, max_step) if max_step > BLOCK else None,
    )


def join_levels(size: int) -> NDArray[np.int64]:
    """[size, size]: below the diagonal the level that joins two rows; 0 on it, -1 above.

    Level l joins rows that share a block of 2^l but none of 2^(l-1).
    """
    row, column = np.indices((size, size))
    levels = np.zeros((size, size), np.int64)
    for level in range(1, size.bit_length() + 1):
        levels[row >> (level - 1) != column >> (level - 1)] = level
    return np.where(row < column, -1, levels)


def _blocks(op: OpBuilder, num_steps: ir.Value, size: ir.Value, max_step: int) -> Blocks:
    count = op.Div(op.Sub(op.Add(num_steps, size), [1]), size)  # P / C, rounded up
    padded = op.Mul(count, size)
    more = op.Sub(padded, num_steps)
    block = op.Div(iota(op, padded), size)  # [n*C]
    near = op.Equal(op.Unsqueeze(block, [1]), block)
    return Blocks(
        square=op.Concat([0, 0, 0, 0], more, more, axis=0),
        tall=op.Concat([0, 0, 0, 0], more, [0], axis=0),
        near=op.Cast(near, to=ir.DataType.FLOAT),
        by_block=op.Concat([-1], size, count, size, axis=0),
        wide=op.Concat([-1], size, padded, axis=0),
        whole=op.Concat([-1], padded, padded, axis=0),
        size=size,
        padded=padded,
        num_steps=num_steps,
        rounds=ceil(max_step / BLOCK) - 1,
    )


def solve(
    op: OpBuilder, lower: ir.Value, right: ir.Value, width: int, step: Triangle
) -> ir.Value:
    """x [Z, P, width] with x + N x = right, N being `lower` [Z, P, P] below its diagonal.

    The diagonal of `lower` is not used; above it there must be zeros.
    """
    if step.blocks is not None:
        return _solve_blocks(op, lower, right, width, step, step.blocks)
    return op.MatMul(_inverse(op, lower, step), right) if step.levels else right


def _inverse(op: OpBuilder, lower: ir.Value, step: Triangle) -> ir.Value:
    """The inverse [n, C, C] of I + N, N being `lower` below its diagonal."""
    pairs, *levels = step.levels
    found = op.Sub(step.identity, op.Mul(lower, pairs))
    for level in levels:
        joined = op.MatMul(op.Mul(lower, level), found)
        found = op.Sub(found, op.MatMul(found, joined))
    return found


def _solve_blocks(
    op: OpBuilder,
    lower: ir.Value,
    right: ir.Value,
    width: int,
    step: Triangle,
    blocks: Blocks,
) -> ir.Value:
    lower = op.Pad(lower, blocks.square)  # [Z, n*C, n*C]
    near = op.Mul(lower, blocks.near)
    # Of the n columns of blocks only the diagonal one is left: [Z*n, C, n, C] -> [Z*n, C, C].
    inner = op.ReduceSum(op.Reshape(near, blocks.by_block), [2], keepdims=0)
    inverse = _inverse(op, inner, step)
    far = op.MatMul(inverse, op.Reshape(op.Sub(lower, near), blocks.wide))
    far = op.Reshape(far, blocks.whole)  # [Z, n*C, n*C]
    short = op.Concat([-1], blocks.size, [width], axis=0)
    right = op.MatMul(inverse, op.Reshape(op.Pad(right, blocks.tall), short))
    right = op.Reshape(right, op.Concat([-1], blocks.padded, [width], axis=0))  # [Z, n*C, d]
    found = right
    for _ in range(blocks.rounds):
        found = op.Sub(right, op.MatMul(far, found))
    return op.Slice(found, [0], blocks.num_steps, [1])
