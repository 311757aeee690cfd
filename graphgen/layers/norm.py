"""RMS norms, spelled so that ONNX Runtime fuses each into one node."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.weights.parameter import Weight


def rms_norm(
    op: OpBuilder, x: ir.Value, weight: ir.Value | list[float], eps: float
) -> ir.Value:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in f32."""
    mean = op.ReduceMean(op.Pow(x, 2.0), [-1], keepdims=1)
    return op.Mul(op.Div(x, op.Sqrt(op.Add(mean, eps))), weight)


class RMSNorm(nn.Module):
    """Weighted RMS norm over the last axis."""

    def __init__(self, weight: Weight, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """x [..., D] -> [..., D]."""
        return rms_norm(op, x, self.weight, self.eps)
