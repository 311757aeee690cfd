"""Expert layers, one class per way of computing the routed sum.

All compute sum_k weight_k * W2_k( silu(min(W1_k x, limit)) * clip(W3_k x, -limit, limit) ), without
the bounds where the family has no limit; factors of the sum are left to the caller. Expert stacks
are written one expert at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.layers.linear import (
    ACCURACY_LEVEL,
    FLOAT_TYPES,
    as_float,
    check_blocks,
    joined,
    linear,
    with_shape,
)
from cachegraph.graphgen.layers.routing import (
    Routing,
    choice_marks,
    dense_weights,
    log_weights,
)
from cachegraph.graphgen.weights.parameter import Piece, Read, Recipe, Weight
from cachegraph.graphgen.weights.quantise import BLOCK, pack_bytes, quantise
from cachegraph.models.export_options import Dialect, Experts, ExportOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSizes:
    """Sizes of a layer's experts. limit: of the activations; None where they have none."""

    hidden: int
    inner: int
    count: int
    chosen: int
    limit: float | None


class ExpertNames(Protocol):
    """Checkpoint names of one layer's experts."""

    def gate_up(self, expert: int) -> list[str]:
        """Gate then up, each [I, D]."""

    def down(self, expert: int) -> str:
        """Down, [D, I]."""


class ExpertLayer(nn.Module):
    """Common sizes of the expert layers."""

    def __init__(self, sizes: ExpertSizes, names: ExpertNames, options: ExportOptions) -> None:
        super().__init__()
        self.sizes, self.options, self.names = sizes, options, names
        self.hidden, self.size = sizes.hidden, sizes.inner
        self.add_weights()

    def add_weights(self) -> None:
        """Declare the layer's parameters."""
        raise NotImplementedError

    def forward(self, op: OpBuilder, x: ir.Value, routing: Routing) -> ir.Value:
        """x [T, D] -> the weighted sum of the chosen experts, [T, D]."""
        raise NotImplementedError


def expert_layer(
    sizes: ExpertSizes, names: ExpertNames, options: ExportOptions
) -> ExpertLayer:
    """The expert layer of the chosen dialect, weight form and expert lowering."""
    bits = options.weights.bits
    if options.experts is Experts.CHOSEN:
        if options.dialect is Dialect.ORT:
            form = FusedExperts if bits is None else FusedQuantExperts
            return form(sizes, names, options)
        if bits is None:
            return GatheredExperts(sizes, names, options)
        if bits == 8:
            return GatheredInt8Experts(sizes, names, options)
    if bits is None:
        return BatchedExperts(sizes, names, options)
    return SeparateExperts(sizes, names, options)


def swiglu(op: OpBuilder, gate: ir.Value, up: ir.Value, limit: float | None) -> ir.Value:
    """silu(min(gate, limit)) * clip(up, -limit, limit); without a limit silu(gate) * up."""
    if limit is not None:
        gate, up = op.Clip(gate, None, limit), op.Clip(up, -limit, limit)
    return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)


def interleaved(gate_up: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Rows gate 0, up 0, gate 1, up 1 ...: [2I, D]."""
    gate, up = gate_up
    return np.stack([gate, up], axis=1).reshape(2 * gate.shape[0], gate.shape[1])


class FusedExperts(ExpertLayer):
    """com.microsoft MoE over float weights [E, out, in], gate and up interleaved."""

    def add_weights(self) -> None:
        """fc1 [E, 2I, D] and fc2 [E, D, I]."""
        experts, dtype = self.sizes.count, FLOAT_TYPES[self.options.weights]

        def make(read: Read) -> Iterator[Piece]:
            for e in range(experts):
                gate_up = [read(name) for name in self.names.gate_up(e)]
                yield Piece("fc1", e, interleaved(gate_up)[None])
                yield Piece("fc2", e, read(self.names.down(e))[None])

        recipe = Recipe(make)
        self.fc1 = recipe.weight("fc1", [experts, 2 * self.size, self.hidden], dtype)
        self.fc2 = recipe.weight("fc2", [experts, self.hidden, self.size], dtype)

    def forward(self, op: OpBuilder, x: ir.Value, routing: Routing) -> ir.Value:
        """The softmax inside MoE turns log weights back into weights."""
        form = self.options.weights
        y = op.MoE(
            x,
            log_weights(op, routing),
            as_float(op, self.fc1, form),
            None,
            as_float(op, self.fc2, form),
            **_fused_attributes(self.sizes),
            _domain="com.microsoft",
        )
        return with_shape(y, ["T", self.hidden])


class FusedQuantExperts(ExpertLayer):
    """com.microsoft QMoE over blockwise int4 or int8 weights."""

    def add_weights(self) -> None:
        """fc1, fc2 as packed codes and f32 scales [E, out, in/block]."""
        experts, block = self.sizes.count, BLOCK
        bits = self.options.weights.bits
        assert bits is not None
        check_blocks(self.names.gate_up(0)[0], self.hidden, block)
        check_blocks(self.names.down(0), self.size, block)

        def make(read: Read) -> Iterator[Piece]:
            for e in range(experts):
                gate_up = interleaved([read(name) for name in self.names.gate_up(e)])
                for key, matrix in (("fc1", gate_up), ("fc2", read(self.names.down(e)))):
                    codes, scales = quantise(matrix, bits, block)
                    yield Piece(key, e, pack_bytes(codes, bits)[None])
                    yield Piece(f"{key}_scales", e, scales[None])

        recipe = Recipe(make)
        u8, h, i = ir.DataType.UINT8, self.hidden, self.size
        self.fc1 = recipe.weight("fc1", [experts, 2 * i, h * bits // 8], u8)
        self.fc1_scales = recipe.weight("fc1_scales", [experts, 2 * i, h // block])
        self.fc2 = recipe.weight("fc2", [experts, h, i * bits // 8], u8)
        self.fc2_scales = recipe.weight("fc2_scales", [experts, h, i // block])

    def forward(self, op: OpBuilder, x: ir.Value, routing: Routing) -> ir.Value:
        """Chosen by marks, weighed by the unbiased scores (input 14), normalised inside."""
        bits = self.options.weights.bits
        y = op.QMoE(
            x,
            choice_marks(op, routing),
            self.fc1,
            self.fc1_scales,
            None,
            self.fc2,
            self.fc2_scales,
            *[None] * 7,
            routing.scores,
            **_fused_attributes(self.sizes),
            expert_weight_bits=bits,
            block_size=BLOCK,
            accuracy_level=ACCURACY_LEVEL if bits == 4 else 0,  # 8 bit has only this kernel
            weights_prepacked=0,  # the CUDA kernel takes the default to mean a shuffled layout
            _domain="com.microsoft",
        )
        return with_shape(y, ["T", self.hidden])


class GatheredExperts(ExpertLayer):
    """The chosen experts' float matrices, gathered: [E, in, out]."""

    def add_weights(self) -> None:
        """gate_up [E, D, 2I] and down [E, I, D]."""
        experts, dtype = self.sizes.count, FLOAT_TYPES[self.options.weights]

        def make(read: Read) -> Iterator[Piece]:
            for e in range(experts):
                gate_up = joined(self.names.gate_up(e))(read)
                yield Piece("gate_up", e, np.ascontiguousarray(gate_up.T)[None])
                yield Piece("down", e, np.ascontiguousarray(read(self.names.down(e)).T)[None])

        recipe = Recipe(make)
        self.gate_up = recipe.weight("gate_up", [experts, self.hidden, 2 * self.size], dtype)
        self.down = recipe.weight("down", [experts, self.size, self.hidden], dtype)

    def forward(self, op: OpBuilder, x: ir.Value, routing: Routing) -> ir.Value:
        """The chosen experts only."""
        gate_up = self._chosen(op, self.gate_up, routing)  # [T, K, D, 2I]
        hidden = op.MatMul(op.Unsqueeze(x, [1, 2]), gate_up)  # [T,1,1,D] -> [T,K,1,2I]
        gate, up = op.Split(hidden, [self.size] * 2, axis=-1, _outputs=2)
        inner = swiglu(op, gate, up, self.sizes.limit)
        outputs = op.MatMul(inner, self._chosen(op, self.down, routing))  # [T, K, 1, D]
        weighted = op.Mul(outputs, op.Unsqueeze(routing.weights, [-1, -2]))
        return op.ReduceSum(weighted, [1, 2], keepdims=0)

    def _chosen(self, op: OpBuilder, stack: ir.Value, routing: Routing) -> ir.Value:
        return as_float(op, op.Gather(stack, routing.columns, axis=0), self.options.weights)


class GatheredInt8Experts(ExpertLayer):
    """The chosen experts' int8 rows and scales, gathered and unpacked. [E, out, blocks, block]."""

    def add_weights(self) -> None:
        """gate_up [E, 2I, D/b, b] and down [E, D, I/b, b] int8, scales [E, out, in/b, 1]."""
        experts, block = self.sizes.count, BLOCK
        check_blocks(self.names.gate_up(0)[0], self.hidden, block)
        check_blocks(self.names.down(0), self.size, block)

        def make(read: Read) -> Iterator[Piece]:
            for e in range(experts):
                gate_up = joined(self.names.gate_up(e))(read)
                for key, matrix in (("gate_up", gate_up), ("down", read(self.names.down(e)))):
                    codes, scales = quantise(matrix, 8, block)
                    yield Piece(key, e, codes.reshape(1, *scales.shape, block))
                    yield Piece(f"{key}_scales", e, scales[None, ..., None])

        recipe = Recipe(make)
        first = [experts, 2 * self.size, self.hidden // block]
        second = [experts, self.hidden, self.size // block]
        self.gate_up = recipe.weight("gate_up", [*first, block], ir.DataType.INT8)
        self.gate_up_scales = recipe.weight("gate_up_scales", [*first, 1])
        self.down = recipe.weight("down", [*second, block], ir.DataType.INT8)
        self.down_scales = recipe.weight("down_scales", [*second, 1])

    def forward(self, op: OpBuilder, x: ir.Value, routing: Routing) -> ir.Value:
        """The chosen experts only."""
        column = op.Unsqueeze(x, [1, -1])  # [T, 1, D, 1]
        gate_up = self._chosen(op, self.gate_up, self.gate_up_scales, routing, self.hidden)
        hidden = op.MatMul(gate_up, column)  # [T, K, 2I, 1]
        gate, up = op.Split(hidden, [self.size] * 2, axis=2, _outputs=2)
        inner = swiglu(op, gate, up, self.sizes.limit)
        down = self._chosen(op, self.down, self.down_scales, routing, self.size)
        outputs = op.MatMul(down, inner)  # [T, K, D, 1]
        weighted = op.Mul(outputs, op.Unsqueeze(routing.weights, [-1, -2]))
        return op.ReduceSum(weighted, [1, 3], keepdims=0)

    def _chosen(
        self, op: OpBuilder, codes: Weight, scales: Weight, routing: Routing, size_in: int
    ) -> ir.Value:
        """[T, K, out, in] f32 of the chosen experts."""
        experts = self.sizes.chosen
        rows = op.Cast(op.Gather(codes, routing.columns, axis=0), to=ir.DataType.FLOAT)
        unpacked = op.Mul(rows, op.Gather(scales, routing.columns, axis=0))
        return op.Reshape(unpacked, [-1, experts, codes.sizes[1], size_in])


class BatchedExperts(GatheredExperts):
    """Every expert on every token as batched float products; the weights drop the others."""

    def forward(self, op: OpBuilder, x: ir.Value, routing: Routing) -> ir.Value:
        """All experts."""
        form = self.options.weights
        hidden = op.MatMul(op.Unsqueeze(x, [0]), as_float(op, self.gate_up, form))
        gate, up = op.Split(hidden, [self.size] * 2, axis=-1, _outputs=2)  # [E, T, I]
        inner = swiglu(op, gate, up, self.sizes.limit)
        dense = op.Transpose(dense_weights(op, routing), perm=[1, 0])
        scaled = op.Mul(inner, op.Unsqueeze(dense, [-1]))  # [E, T, 1]
        outputs = op.MatMul(scaled, as_float(op, self.down, form))  # [E, T, D]
        return op.ReduceSum(outputs, [0], keepdims=0)


class SeparateExperts(ExpertLayer):
    """Quantised experts as 2-D matrices, one pair each, all run: ONNX has no int4 Gather."""

    def add_weights(self) -> None:
        """One linear pair per expert."""
        h, i, options = self.hidden, self.size, self.options
        experts = range(self.sizes.count)
        self.gate_up = nn.ModuleList(
            [linear(self.names.gate_up(e), h, 2 * i, options) for e in experts]
        )
        self.down = nn.ModuleList(
            [linear([self.names.down(e)], i, h, options) for e in experts]
        )

    def forward(self, op: OpBuilder, x: ir.Value, routing: Routing) -> ir.Value:
        """All experts."""
        dense = dense_weights(op, routing)
        count = self.sizes.count
        columns = op.Split(dense, [1] * count, axis=1, _outputs=count)  # E of [T, 1]
        columns = [columns] if count == 1 else columns
        outputs = []
        for gate_up, down, column in zip(self.gate_up, self.down, columns, strict=True):
            gate, up = op.Split(gate_up(op, x), [self.size] * 2, axis=-1, _outputs=2)
            inner = swiglu(op, gate, up, self.sizes.limit)
            outputs.append(op.Mul(down(op, inner), column))
        return outputs[0] if count == 1 else op.Sum(*outputs)


def _fused_attributes(sizes: ExpertSizes) -> dict[str, object]:
    limit = {} if sizes.limit is None else {"swiglu_limit": sizes.limit}
    return {
        "k": sizes.chosen,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        **limit,
        "normalize_routing_weights": 1,
    }
