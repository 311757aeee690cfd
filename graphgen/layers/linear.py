"""Matrix products with a stored matrix, in every weight form.

Sources are torch matrices [out, in]; several are joined along `out`. Stored [in, out], so that no
transpose runs in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.weights.parameter import Piece, Read, Recipe, tensor
from cachegraph.graphgen.weights.quantise import BLOCK, pack_bytes, pack_int4, quantise
from cachegraph.models.errors import ConfigError
from cachegraph.models.export_options import Dialect, ExportOptions, WeightType

Matrix = Callable[[Read], NDArray[Any]]
Rows = tuple[int | str, ...]  # the dims of an input in front of its last one
FLOAT_TYPES = {
    WeightType.F32: ir.DataType.FLOAT,
    WeightType.F16: ir.DataType.FLOAT16,
    WeightType.BF16: ir.DataType.BFLOAT16,
}
# MatMulNBits and QMoE round activations to int8 per block: ONNX Runtime's fast path.
ACCURACY_LEVEL = 4


def joined(names: Sequence[str]) -> Matrix:
    """Source matrices [out_i, in] joined along `out`."""
    return lambda read: np.concatenate([read(name) for name in names])


def linear(
    names: Sequence[str],
    size_in: int,
    size_out: int,
    options: ExportOptions,
    rows: Rows = ("T",),
) -> FloatLinear | NBitsLinear | DequantLinear:
    """The linear layer of the chosen weight form for a big matrix, for inputs [*rows, in]."""
    return linear_of(joined(names), names[0], size_in, size_out, options, rows)


def linear_of(
    matrix: Matrix,
    name: str,
    size_in: int,
    size_out: int,
    options: ExportOptions,
    rows: Rows = ("T",),
) -> FloatLinear | NBitsLinear | DequantLinear:
    """As `linear`, of a matrix [out, in] that is made of tensors; `name` is for messages."""
    if options.weights.bits is None:
        return FloatLinear(matrix, size_in, size_out, options.weights)
    check_blocks(name, size_in, BLOCK)
    return quant_linear(matrix, size_in, size_out, options, rows)


def quant_linear(
    matrix: Matrix, size_in: int, size_out: int, options: ExportOptions, rows: Rows = ("T",)
) -> NBitsLinear | DequantLinear:
    """The quantised form of the dialect."""
    bits, block = options.weights.bits, BLOCK
    assert bits is not None
    if options.dialect is Dialect.ORT:
        return NBitsLinear(matrix, size_in, size_out, bits, block, rows)
    return DequantLinear(matrix, size_in, size_out, bits, block)


def check_blocks(name: str, size: int, block: int) -> None:
    """ConfigError where an input size cannot be cut into whole blocks."""
    if size % block:
        raise ConfigError(
            f"{name}: input size {size} is no multiple of the quantisation block {block}; "
            "export this model with float weights"
        )


class FloatLinear(nn.Module):
    """x @ W with W stored as f32, f16 or bf16; the halves are cast to f32 (folded at load)."""

    def __init__(
        self,
        matrix: Matrix,
        size_in: int,
        size_out: int,
        form: WeightType = WeightType.F32,
    ) -> None:
        super().__init__()
        self.form = form
        self.weight = tensor(
            lambda read: np.ascontiguousarray(matrix(read).T),
            [size_in, size_out],
            FLOAT_TYPES[form],
        )

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """x [..., in] -> [..., out]."""
        return op.MatMul(x, as_float(op, self.weight, self.form))


class NBitsLinear(nn.Module):
    """com.microsoft MatMulNBits: weights [out, blocks, bytes] as the kernel reads them."""

    def __init__(
        self, matrix: Matrix, size_in: int, size_out: int, bits: int, block: int, rows: Rows
    ) -> None:
        super().__init__()
        blocks, self.rows = size_in // block, rows
        self.sizes = {"K": size_in, "N": size_out, "bits": bits, "block_size": block}

        def make(read: Read) -> Iterator[Piece]:
            codes, scales = quantise(matrix(read), bits, block)
            packed = pack_bytes(codes, bits).reshape(size_out, blocks, block * bits // 8)
            yield Piece("weight", 0, packed)
            yield Piece("scales", 0, scales)

        recipe = Recipe(make)
        self.weight = recipe.weight(
            "weight", [size_out, blocks, block * bits // 8], ir.DataType.UINT8
        )
        self.scales = recipe.weight("scales", [size_out, blocks])

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """x [..., in] -> [..., out]."""
        y = op.MatMulNBits(
            x,
            self.weight,
            self.scales,
            **self.sizes,
            accuracy_level=ACCURACY_LEVEL,
            _domain="com.microsoft",
        )
        return with_shape(y, [*self.rows, self.sizes["N"]])


class DequantLinear(nn.Module):
    """Blocked DequantizeLinear + MatMul: 2-D [in, out], blocks along axis 0, symmetric.

    This is the one form that ONNX Runtime fuses, and only if the matrix has one use.
    """

    def __init__(
        self, matrix: Matrix, size_in: int, size_out: int, bits: int, block: int
    ) -> None:
        super().__init__()
        self.block = block

        def make(read: Read) -> Iterator[Piece]:
            codes, scales = quantise(matrix(read), bits, block)
            columns = np.ascontiguousarray(codes.T)
            yield Piece("weight", 0, columns if bits == 8 else pack_int4(columns))
            yield Piece("scales", 0, np.ascontiguousarray(scales.T))

        recipe = Recipe(make)
        self.weight = recipe.weight(
            "weight",
            [size_in, size_out],
            ir.DataType.INT8 if bits == 8 else ir.DataType.INT4,
        )
        self.scales = recipe.weight("scales", [size_in // block, size_out])

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """x [..., in] -> [..., out]."""
        matrix = op.DequantizeLinear(self.weight, self.scales, axis=0, block_size=self.block)
        return op.MatMul(x, matrix)


def as_float(op: OpBuilder, weight: ir.Value, form: WeightType) -> ir.Value:
    """The f32 value of a float weight."""
    return weight if form is WeightType.F32 else op.Cast(weight, to=ir.DataType.FLOAT)


def with_shape(value: ir.Value, shape: Sequence[int | str]) -> ir.Value:
    """Declare the f32 shape of a com.microsoft result, which shape inference does not know."""
    value.shape = ir.Shape(shape)
    value.type = ir.TensorType(ir.DataType.FLOAT)
    return value
