"""Storage forms against values worked out from the definition of each format."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cachegraph.graphgen.weights.dequant import (
    decode_floats,
    decode_scales,
    dequantize_fp4,
    dequantize_fp8,
    fp4_shapes,
    fp8_grid,
)
from cachegraph.models.errors import CheckpointError

pytestmark = pytest.mark.r0


def e4m3(byte: int) -> float:
    """Sign, 4 exponent bits with bias 7, 3 mantissa bits; exponent 0 is subnormal."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1(code: int) -> float:
    """Sign, 2 exponent bits with bias 1, 1 mantissa bit; exponent 0 is subnormal."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    return sign * (
        mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    )


FINITE_E4M3 = np.array([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_floats(dtype):
    values = np.array([0.0, -1.5, 3.140625, 2.0**-14], ml_dtypes.bfloat16).astype(dtype)
    spelled = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    read = decode_floats(values.view(np.uint8), spelled)
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, values.astype(np.float32))


def test_e8m0_scales_are_powers_of_two_down_to_byte_zero():
    scales = decode_scales("s", np.array([0, 1, 127, 128, 254], np.uint8), "F8_E8M0")
    assert scales.tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0, 2.0**127]
    raw = decode_scales("s", np.array([0, 130], np.uint8), "U8")
    assert raw.tolist() == [2.0**-127, 8.0]


def test_float_scales_are_taken_as_they_are():
    values = np.array([0.25, 3.5], np.float32)
    assert decode_scales("s", values.view(np.uint8), "F32").tolist() == [0.25, 3.5]
    halves = values.astype(ml_dtypes.bfloat16)
    assert decode_scales("s", halves.view(np.uint8), "BF16").tolist() == [0.25, 3.5]


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (np.array([127, 255, 3], np.uint8), "F8_E8M0"),
        (np.array([1, np.nan, 2], np.float32), "F32"),
        (np.array([1, np.inf, 2], np.float32), "F32"),
    ],
)
def test_a_scale_that_is_no_number_names_the_tensor(data, dtype):
    with pytest.raises(CheckpointError, match=r"layers\.0\.x\.scale: 1 of 3 scales"):
        decode_scales("layers.0.x.scale", data.view(np.uint8), dtype)


def test_every_e4m3_code():
    out = dequantize_fp8(FINITE_E4M3, np.ones((2, 1), np.float32), 1)
    assert out.ravel().tolist() == [e4m3(int(byte)) for byte in FINITE_E4M3]


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (128, 128), (129, 127), (300, 257), (5, 384), (260, 3)]
)
def test_fp8_blocks_of_any_size(rows, columns):
    rng = np.random.default_rng(rows * 1000 + columns)
    codes = rng.choice(FINITE_E4M3, (rows, columns))
    scales = (2.0 ** rng.integers(-9, 9, fp8_grid(rows, columns))).astype(np.float32)
    out = dequantize_fp8(codes.ravel(), scales, columns)
    assert out.shape == (rows, columns)
    assert out.dtype == np.float32
    picks = {(0, 0), (rows - 1, columns - 1), (0, columns - 1), (rows - 1, 0)}
    picks |= {
        (int(i), int(j))
        for i, j in zip(rng.integers(0, rows, 99), rng.integers(0, columns, 99), strict=True)
    }
    for i, j in picks:
        assert out[i, j] == e4m3(int(codes[i, j])) * scales[i // 128, j // 128]


def test_fp8_scales_multiply():
    assert dequantize_fp8(np.array([0x38], np.uint8), np.full((1, 1), 4, np.float32), 1) == 4


def test_fp4_low_nibble_is_the_even_column():
    out = dequantize_fp4(np.array([0x71, 0xF9], np.uint8), np.ones((1, 1), np.float32), 4)
    assert out.tolist() == [[0.5, 6.0, -0.5, -6.0]]


def test_every_e2m1_pair():
    pairs = np.arange(256, dtype=np.uint8)
    out = dequantize_fp4(pairs, np.ones((256, 1), np.float32), 2)
    assert out.tolist() == [[e2m1(byte & 15), e2m1(byte >> 4)] for byte in range(256)]


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 2), (3, 32), (130, 34), (257, 96), (128, 62)]
)
def test_fp4_groups_of_any_size(rows, columns):
    rng = np.random.default_rng(rows * 1000 + columns)
    packed_shape, scale_shape = fp4_shapes(rows, columns)
    packed = rng.integers(0, 256, packed_shape, np.uint8)
    scales = (2.0 ** rng.integers(-9, 9, scale_shape)).astype(np.float32)
    out = dequantize_fp4(packed.ravel(), scales, columns)
    assert out.shape == (rows, columns)
    assert out.dtype == np.float32
    for i, j in zip(rng.integers(0, rows, 99), rng.integers(0, columns, 99), strict=True):
        code = int(packed[i, j // 2]) >> (4 * (j % 2)) & 15
        assert out[i, j] == e2m1(code) * scales[i, j // 32]
    assert out[-1, -1] == e2m1(int(packed[-1, -1]) >> 4) * scales[-1, -1]
