"""Reads and writes of cache rows: the only place that emits them.

Runtimes differ in which operator they run well, so that each has lowerings. Whole rows are read by
Gather on axis 0 by default; indices always have rank 1 or more and are never negative. Everything
outside sees f32 rows: those written are converted before the scatter, those read after the gather,
and no other row of a cache is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder

from cachegraph.models.cache_types import Q8_BLOCK
from cachegraph.models.contract import CacheKind, CachePart, CacheSpec, DType
from cachegraph.models.export_options import RowRead, RowWrite

ONNX_TYPES = {
    DType.FLOAT32: ir.DataType.FLOAT,
    DType.FLOAT16: ir.DataType.FLOAT16,
    DType.BFLOAT16: ir.DataType.BFLOAT16,
    DType.INT8: ir.DataType.INT8,
    DType.INT64: ir.DataType.INT64,
}
# Bounds of a scale that f16 can hold; the lower one keeps a row of zeros from dividing by zero.
_LEAST_SCALE, _GREATEST_SCALE = 2.0**-24, 65504.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One cache in the graph: values [rows, width] as they are stored, and what they need.

    scales [rows, width / 32] where the values are int8 codes, else None.
    """

    dtype: DType
    values: ir.Value
    scales: ir.Value | None = None

    def part(self, part: CachePart) -> ir.Value:
        """One buffer of the cache."""
        value = self.values if part is CachePart.VALUES else self.scales
        assert value is not None
        return value


def stored_caches(
    specs: Iterable[CacheSpec], values: Mapping[str, ir.Value]
) -> dict[CacheKind, Stored]:
    """The caches of one layer by kind, from graph inputs by contract name."""
    by_part = {(spec.kind, spec.part): values[spec.name] for spec in specs}
    return {
        spec.kind: Stored(
            dtype=spec.dtype,
            values=values[spec.name],
            scales=by_part.get((spec.kind, CachePart.SCALES)),
        )
        for spec in specs
        if spec.part is CachePart.VALUES
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOps:
    """The chosen lowerings."""

    read: RowRead = RowRead.ROWS
    write: RowWrite = RowWrite.ND

    def read_rows(
        self,
        op: OpBuilder,
        cache: Stored,
        idxs: ir.Value,
        width: int,
        lead: ir.Value | list[int],
    ) -> ir.Value:
        """Rows of a cache of `width` values at `idxs` (any shape) -> f32 idxs.shape + [width].

        `lead` is the int64 vector shape(idxs) + [width].
        """
        rows = self._gather(op, cache.values, idxs, width, lead)
        if cache.dtype is DType.FLOAT32:
            return rows
        rows = op.Cast(rows, to=ir.DataType.FLOAT)
        if cache.scales is None:
            return rows
        scales = self._gather(op, cache.scales, idxs, width // Q8_BLOCK, [-1, 1])
        scales = op.Reshape(op.Cast(scales, to=ir.DataType.FLOAT), [-1, 1])
        blocks = op.Reshape(rows, [-1, Q8_BLOCK])  # [n * W/32, 32]
        return op.Reshape(op.Mul(blocks, scales), lead)

    def write_rows(
        self, op: OpBuilder, cache: Stored, idxs: ir.Value, rows: ir.Value, width: int
    ) -> Stored:
        """`cache` with row idxs[i] replaced by rows[i]; idxs [n] unique, f32 rows [n, width]."""
        if cache.scales is not None:
            codes, scales = _quantise(op, rows, width)
            return Stored(
                dtype=cache.dtype,
                values=self._scatter(op, cache.values, idxs, codes, width),
                scales=self._scatter(op, cache.scales, idxs, scales, width // Q8_BLOCK),
            )
        if cache.dtype is not DType.FLOAT32:
            rows = op.Cast(rows, to=ONNX_TYPES[cache.dtype])
        return Stored(
            dtype=cache.dtype, values=self._scatter(op, cache.values, idxs, rows, width)
        )

    def _gather(
        self,
        op: OpBuilder,
        buffer: ir.Value,
        idxs: ir.Value,
        width: int,
        lead: ir.Value | list[int],
    ) -> ir.Value:
        if self.read is RowRead.ROWS:
            return op.Gather(buffer, idxs, axis=0)
        if self.read is RowRead.ND:
            return op.GatherND(buffer, op.Unsqueeze(idxs, [-1]))
        wide = op.Expand(op.Reshape(idxs, [-1, 1]), [1, width])  # [n] -> [n, width]
        return op.Reshape(op.GatherElements(buffer, wide, axis=0), lead)

    def _scatter(
        self, op: OpBuilder, buffer: ir.Value, idxs: ir.Value, rows: ir.Value, width: int
    ) -> ir.Value:
        column = op.Unsqueeze(idxs, [-1])  # [n] -> [n, 1]
        if self.write is RowWrite.ND:
            return op.ScatterND(buffer, column, rows)
        return op.ScatterElements(buffer, op.Expand(column, [1, width]), rows, axis=0)


def _quantise(op: OpBuilder, rows: ir.Value, width: int) -> tuple[ir.Value, ir.Value]:
    """f32 [n, width] -> int8 codes [n, width] and f16 scales [n, width / 32].

    Codes are those of the rounded scale, which is the one that reads see.
    """
    blocks = op.Reshape(rows, [-1, Q8_BLOCK])  # [n * W/32, 32]
    peak = op.ReduceMax(op.Abs(blocks), [1], keepdims=1)
    scale = op.Clip(op.Div(peak, 127.0), _LEAST_SCALE, _GREATEST_SCALE)
    scale = op.Cast(scale, to=ir.DataType.FLOAT16)
    codes = op.Round(op.Div(blocks, op.Cast(scale, to=ir.DataType.FLOAT)))
    codes = op.Cast(op.Clip(codes, -127.0, 127.0), to=ir.DataType.INT8)
    return op.Reshape(codes, [-1, width]), op.Reshape(scale, [-1, width // Q8_BLOCK])
