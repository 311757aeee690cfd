"""Symmetric blockwise quantisation of matrices, and the layouts of the kernels that read them.

Each block of `block` values along the input axis has one f32 scale. Why this is our own: see
docs/decisions/002-quantiser.md. Pure numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # values per scale: what every kernel in use takes

# Candidate shrink factors of the largest magnitude, tried for 4 bits: clipping the outlier of a
# block costs less squared error than a coarser grid for the other values.
_SHRINK_4BIT = tuple(1.0 - 0.03 * i for i in range(12))


class Quantised(NamedTuple):
    """codes int8 [out, in] in [-2^(bits-1), 2^(bits-1)-1]; scales f32 [out, in/block]."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]


def quantise(matrix: NDArray[np.float32], bits: int, block: int) -> Quantised:
    """Quantise a [out, in] matrix; `in` must be a multiple of `block`.

    8 bits: scale = max|w| / 127. 4 bits: the scale of least squared error among shrunken ones, with
    the sign chosen so that the largest value takes the extra negative code -8.
    """
    rows, cols = matrix.shape
    blocks = matrix.reshape(rows, cols // block, block)
    scales = _scales_8bit(blocks) if bits == 8 else _scales_4bit(blocks)
    codes = _codes(blocks, scales, bits)
    return Quantised(codes.reshape(rows, cols), scales)


def dequantise(quantised: Quantised, block: int) -> NDArray[np.float32]:
    """The f32 [out, in] matrix that the kernels compute with."""
    rows, cols = quantised.codes.shape
    blocks = quantised.codes.reshape(rows, cols // block, block).astype(np.float32)
    return (blocks * quantised.scales[..., None]).reshape(rows, cols)


def pack_bytes(codes: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """Unsigned codes (offset 2^(bits-1)), two per byte at 4 bits with the even one low.

    This is how MatMulNBits and QMoE read them without a zero point.
    """
    unsigned = (codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    return unsigned if bits == 8 else _nibbles(unsigned)


def pack_int4(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """ONNX INT4: two's complement nibbles in row-major order, the even one low; flat bytes."""
    flat = np.bitwise_and(codes.reshape(-1).view(np.uint8), np.uint8(0x0F))
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return _nibbles(flat)


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes of 4 bits per byte along the last axis, the even one low."""
    high = np.left_shift(codes[..., 1::2], np.uint8(4))
    return np.bitwise_or(codes[..., 0::2], high).astype(np.uint8)


def _scales_8bit(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    peak = np.abs(blocks).max(axis=-1)
    return np.where(peak == 0, 1.0, peak / 127).astype(np.float32)


def _scales_4bit(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    index = np.abs(blocks).argmax(axis=-1)[..., None]
    peak = np.take_along_axis(blocks, index, axis=-1)[..., 0]
    full = np.where(peak == 0, 1.0, peak / -8).astype(np.float32)
    best, best_error = full, _squared_error(blocks, full)
    for shrink in _SHRINK_4BIT[1:]:
        scales = (full * np.float32(shrink)).astype(np.float32)
        error = _squared_error(blocks, scales)
        better = error < best_error
        best = np.where(better, scales, best)
        best_error = np.where(better, error, best_error)
    return best


def _squared_error(
    blocks: NDArray[np.float32], scales: NDArray[np.float32]
) -> NDArray[np.float32]:
    codes = np.clip(np.round(blocks / scales[..., None]), -8, 7)
    return np.square(codes * scales[..., None] - blocks).sum(axis=-1)


def _codes(
    blocks: NDArray[np.float32], scales: NDArray[np.float32], bits: int
) -> NDArray[np.int8]:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return np.clip(np.round(blocks / scales[..., None]), low, high).astype(np.int8)
