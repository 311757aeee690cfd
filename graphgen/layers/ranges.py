"""Index vectors whose length is a size of the step."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder


def iota(op: OpBuilder, length: ir.Value) -> ir.Value:
    """0 .. length-1 as int64 [length]; length has shape [1]."""
    return op.Range(0, op.Squeeze(length, [0]), 1)
