"""RMS norm of each head's output, times a plain weight, times an activated gate; all in f32."""

from __future__ import annotations

from enum import StrEnum

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.layers.norm import rms_norm
from cachegraph.graphgen.weights.parameter import Weight


class GateActivation(StrEnum):
    """What the gate goes through, spelled as checkpoints spell it."""

    SIGMOID = "sigmoid"
    SILU = "silu"


class GatedNorm(nn.Module):
    """rms(x) * weight * activation(gate), the norm per head; width is heads * head size."""

    def __init__(
        self, weight: Weight, width: int, eps: float, activation: GateActivation
    ) -> None:
        super().__init__()
        self.weight, self.width, self.eps, self.activation = weight, width, eps, activation

    def forward(self, op: OpBuilder, x: ir.Value, gate: ir.Value) -> ir.Value:
        """x [S, P, H, D] and gate [S, P, H*D] -> [S, P, H*D]."""
        normed = op.Reshape(rms_norm(op, x, self.weight, self.eps), [0, 0, self.width])
        open_gate = op.Sigmoid(gate)
        if self.activation is GateActivation.SILU:
            open_gate = op.Mul(gate, open_gate)
        return op.Mul(normed, open_gate)
