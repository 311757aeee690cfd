"""Grouped low-rank output projection: heads in G groups, each to its own rank, then to hidden."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.layers.linear import (
    FLOAT_TYPES,
    as_float,
    check_blocks,
    linear,
    quant_linear,
)
from cachegraph.graphgen.weights.parameter import Read, tensor
from cachegraph.graphgen.weights.quantise import BLOCK
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.export_options import ExportOptions


class GroupedOutput(nn.Module):
    """wo_a per group of heads, then wo_b. `prefix` is the attention's checkpoint path."""

    def __init__(self, config: DeepseekV4Config, prefix: str, options: ExportOptions) -> None:
        super().__init__()
        groups, rank = config.o_groups, config.o_lora_rank
        size = config.num_heads * config.head_dim // groups
        name = f"{prefix}.wo_a.weight"
        form = FloatGroups if options.weights.bits is None else QuantGroups
        self.wo_a = form(name, groups, size, rank, options)
        self.wo_b = linear(
            [f"{prefix}.wo_b.weight"], groups * rank, config.hidden_size, options
        )

    def forward(self, op: OpBuilder, mixed: ir.Value) -> ir.Value:
        """mixed [T, H, hd] -> [T, D]."""
        return self.wo_b(op, self.wo_a(op, mixed))


class FloatGroups(nn.Module):
    """All groups as one batched product with weights [G, in, rank]."""

    def __init__(
        self, name: str, groups: int, size: int, rank: int, options: ExportOptions
    ) -> None:
        super().__init__()
        self.groups, self.size, self.rank, self.form = groups, size, rank, options.weights

        def matrix(read: Read) -> NDArray[np.float32]:
            stacked = read(name).reshape(groups, rank, size)
            return np.ascontiguousarray(stacked.transpose(0, 2, 1))

        self.weight = tensor(matrix, [groups, size, rank], FLOAT_TYPES[self.form])

    def forward(self, op: OpBuilder, mixed: ir.Value) -> ir.Value:
        """mixed [T, H, hd] -> [T, G*rank]."""
        grouped = op.Transpose(
            op.Reshape(mixed, [-1, self.groups, self.size]), perm=[1, 0, 2]
        )  # [T, G, in] -> [G, T, in]
        ranks = op.MatMul(grouped, as_float(op, self.weight, self.form))
        return op.Reshape(op.Transpose(ranks, perm=[1, 0, 2]), [-1, self.groups * self.rank])


class QuantGroups(nn.Module):
    """One quantised matrix per group: the fused kernels take 2-D matrices only."""

    def __init__(
        self, name: str, groups: int, size: int, rank: int, options: ExportOptions
    ) -> None:
        super().__init__()
        self.groups, self.size = groups, size
        check_blocks(name, size, BLOCK)
        self.parts = nn.ModuleList(
            [
                quant_linear(_rows(name, group * rank, rank), size, rank, options)
                for group in range(groups)
            ]
        )

    def forward(self, op: OpBuilder, mixed: ir.Value) -> ir.Value:
        """mixed [T, H, hd] -> [T, G*rank]."""
        flat = op.Reshape(mixed, [-1, self.groups * self.size])
        if self.groups == 1:
            return self.parts[0](op, flat)
        inputs = op.Split(flat, [self.size] * self.groups, axis=-1, _outputs=self.groups)
        outputs = [part(op, x) for part, x in zip(self.parts, inputs, strict=True)]
        return op.Concat(*outputs, axis=-1)


def _rows(name: str, start: int, count: int) -> Callable[[Read], NDArray[np.float32]]:
    return lambda read: read(name)[start : start + count]
