"""Storage forms -> float32: plain floats, FP8 with block scales, FP4 with scales per 32.

Pure functions of arrays. Work is done in bands of rows, so that beside input and output no array is
larger than one band.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import ml_dtypes
import numpy as np

from cachegraph.models.errors import CheckpointError

BLOCK = 128  # FP8: one scale per BLOCK x BLOCK block
GROUP = 32  # FP4: one scale per GROUP columns of a row

_FLOATS: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(ml_dtypes.float8_e8m0fnu),  # E8M0 scales whose bytes were stored as such
}
FLOAT_DTYPES = ("F32", "F16", "BF16")
SCALE_DTYPES = ("F8_E8M0", "U8", "F32", "BF16")
FP8_DTYPE = "F8_E4M3"
FP4_DTYPES = ("I8", "U8")

# Tables of every code: a look-up is several times faster than a cast from a small float type.
_E4M3 = np.arange(256, dtype=np.uint8).view(_FLOATS[FP8_DTYPE]).astype(np.float32)
# e2m1 codes 0..15: bit 3 is the sign. One byte holds two columns, the low nibble first, so that a
# byte's two values are one 8-byte word.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_CODES = np.concatenate([_E2M1, -_E2M1])
_E2M1_PAIRS = np.stack([np.tile(_E2M1_CODES, 16), np.repeat(_E2M1_CODES, 16)], axis=1)
_E2M1_WORDS = _E2M1_PAIRS.view(np.uint64).ravel()


def fp8_grid(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of an FP8 matrix; the last block of a side may be cut short."""
    return ceil(rows / BLOCK), ceil(columns / BLOCK)


def fp4_shapes(rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the packed bytes and of the scales of an FP4 matrix with an even column count."""
    return (rows, columns // 2), (rows, ceil(columns / GROUP))


def decode_floats(data: np.ndarray, dtype: str) -> np.ndarray:
    """uint8 [bytes] of F32, F16 or BF16 -> float32 [items]."""
    values: np.ndarray = data.view(_FLOATS[dtype]).astype(np.float32, copy=False)
    return values


def decode_scales(name: str, data: np.ndarray, dtype: str) -> np.ndarray:
    """uint8 [bytes] of scales -> float32 [items]. CheckpointError where one is not a number.

    An E8M0 byte b is 2^(b-127), and 255 is NaN.
    """
    scales: np.ndarray = data.view(_FLOATS[dtype]).astype(np.float32)
    if not np.isfinite(scales).all():
        count = int((~np.isfinite(scales)).sum())
        raise CheckpointError(
            f"{name}: {count} of {scales.size} scales are NaN or infinite (E8M0 byte 255 is NaN); "
            "download the file again or get another conversion of the checkpoint"
        )
    return scales


def dequantize_fp8(data: np.ndarray, scales: np.ndarray, columns: int) -> np.ndarray:
    """uint8 [rows*columns] of e4m3, float32 scales [row blocks, column blocks] -> [rows, columns].

    Element (i, j) is e4m3(data[i, j]) * scales[i // 128, j // 128].
    """
    codes = data.reshape(-1, columns)
    out = np.empty(codes.shape, np.float32)
    for block, band in enumerate(_bands(len(out))):
        out[band] = _E4M3[codes[band]]
        out[band] *= np.repeat(scales[block], BLOCK)[:columns]
    return out


def dequantize_fp4(data: np.ndarray, scales: np.ndarray, columns: int) -> np.ndarray:
    """uint8 [rows*columns/2] of packed e2m1 and float32 scales [rows, groups] -> [rows, columns].

    Byte k of a row holds columns 2k (low nibble) and 2k+1; element (i, j) is
    e2m1(code) * scales[i, j // 32].
    """
    pairs = data.reshape(-1, columns // 2)
    out = np.empty((len(pairs), columns), np.float32)
    words = out.view(np.uint64)
    for band in _bands(len(out)):
        words[band] = _E2M1_WORDS[pairs[band]]
        out[band] *= np.repeat(scales[band], GROUP, axis=1)[:, :columns]
    return out


def _bands(rows: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, rows, BLOCK))
