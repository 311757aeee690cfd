"""Rotary embedding: adjacent pairs on the last channels of a row, or halves on its first ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder


class RopeTable(NamedTuple):
    """cos and sin [n, rope_dim], each pair's value twice, and the pair rotation matrix.

    x @ rotation sends (x0, x1) to (-x1, x0) for every pair: each column holds a single +-1, so the
    product is exact.
    """

    cos: ir.Value
    sin: ir.Value
    rotation: ir.Value
    rope_dim: int

    def per_head(self, op: OpBuilder) -> RopeTable:
        """The same table with a head axis: [n, 1, rope_dim]."""
        return self._replace(cos=op.Unsqueeze(self.cos, [1]), sin=op.Unsqueeze(self.sin, [1]))

    def inverse(self, op: OpBuilder) -> RopeTable:
        """The table of the opposite rotation."""
        return self._replace(sin=op.Neg(self.sin))


def rotation_matrix(rope_dim: int) -> NDArray[np.float32]:
    """[rope_dim, rope_dim] matrix of the quarter turn of every adjacent pair."""
    matrix = np.zeros((rope_dim, rope_dim), np.float32)
    even = np.arange(0, rope_dim, 2)
    matrix[even + 1, even] = -1
    matrix[even, even + 1] = 1
    return matrix


def half_rotation_matrix(rope_dim: int) -> NDArray[np.float32]:
    """[rope_dim, rope_dim] matrix of the quarter turn of every pair (i, i + rope_dim / 2)."""
    matrix = np.zeros((rope_dim, rope_dim), np.float32)
    first = np.arange(rope_dim // 2)
    second = first + rope_dim // 2
    matrix[second, first] = -1
    matrix[first, second] = 1
    return matrix


def rope_table(
    op: OpBuilder,
    positions: ir.Value,
    frequencies: ir.Value,
    rotation: ir.Value,
    rope_dim: int,
) -> RopeTable:
    """Cos and sin in f32 of positions [n] times frequencies [1, rope_dim]."""
    angles = op.Mul(
        op.Unsqueeze(op.Cast(positions, to=ir.DataType.FLOAT), [-1]), frequencies
    )  # [n, 1] x [1, rope_dim]
    return RopeTable(op.Cos(angles), op.Sin(angles), rotation, rope_dim)


def rotate(op: OpBuilder, x: ir.Value, table: RopeTable, width: int) -> ir.Value:
    """Rotate the last rope_dim channels of x [..., width]; the others pass through."""
    if width == table.rope_dim:
        return _turn(op, x, table)
    fixed, moving = op.Split(x, [width - table.rope_dim, table.rope_dim], axis=-1, _outputs=2)
    return op.Concat(fixed, _turn(op, moving, table), axis=-1)


def rotate_first(op: OpBuilder, x: ir.Value, table: RopeTable, width: int) -> ir.Value:
    """Rotate the first rope_dim channels of x [..., width]; the others pass through."""
    if width == table.rope_dim:
        return _turn(op, x, table)
    moving, fixed = op.Split(x, [table.rope_dim, width - table.rope_dim], axis=-1, _outputs=2)
    return op.Concat(_turn(op, moving, table), fixed, axis=-1)


def _turn(op: OpBuilder, x: ir.Value, table: RopeTable) -> ir.Value:
    turned = op.MatMul(x, table.rotation)
    return op.Add(op.Mul(x, table.cos), op.Mul(turned, table.sin))
