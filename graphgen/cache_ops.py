"""Reads and writes of cache rows: the only place that emits them.

Runtimes differ in which operator they run well, so that each has lowerings. Whole rows are read by
Gather on axis 0 by default; indices always have rank 1 or more and are never negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder

from cachegraph.models.export_options import RowRead, RowWrite


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOps:
    """The chosen lowerings."""

    read: RowRead = RowRead.ROWS
    write: RowWrite = RowWrite.ND

    def read_rows(
        self,
        op: OpBuilder,
        cache: ir.Value,
        idxs: ir.Value,
        width: int,
        lead: ir.Value | list[int],
    ) -> ir.Value:
        """Rows of `cache` [rows, width] at `idxs` (any shape) -> idxs.shape + [width].

        `lead` is the int64 vector shape(idxs) + [width], needed by the elements lowering.
        """
        if self.read is RowRead.ROWS:
            return op.Gather(cache, idxs, axis=0)
        if self.read is RowRead.ND:
            return op.GatherND(cache, op.Unsqueeze(idxs, [-1]))
        wide = op.Expand(op.Reshape(idxs, [-1, 1]), [1, width])  # [n] -> [n, width]
        return op.Reshape(op.GatherElements(cache, wide, axis=0), lead)

    def write_rows(
        self, op: OpBuilder, cache: ir.Value, idxs: ir.Value, rows: ir.Value, width: int
    ) -> ir.Value:
        """`cache` with row idxs[i] replaced by rows[i]; idxs [n] unique, rows [n, width]."""
        column = op.Unsqueeze(idxs, [-1])  # [n] -> [n, 1]
        if self.write is RowWrite.ND:
            return op.ScatterND(cache, column, rows)
        return op.ScatterElements(cache, op.Expand(column, [1, width]), rows, axis=0)
