"""Quantised matrices against plain loops: codes, scales, error bound, and the packed layouts."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cachegraph.graphgen.weights.quantise import dequantise, pack_bytes, pack_int4, quantise

pytestmark = pytest.mark.r1

FORMS = [(8, 32), (8, 16), (4, 32), (4, 16)]


def matrix(rows: int = 7, cols: int = 96, seed: int = 3) -> NDArray[np.float32]:
    """Rows of very different size, with outliers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, cols)) * np.exp(rng.normal(size=(rows, 1)))
    values[:, ::13] *= 4
    return values.astype(np.float32)


@pytest.mark.parametrize(("bits", "block"), FORMS)
def test_codes_and_scales_have_the_stated_shapes_and_ranges(bits: int, block: int) -> None:
    codes, scales = quantise(matrix(), bits, block)
    assert (codes.dtype, codes.shape) == (np.int8, (7, 96))
    assert (scales.dtype, scales.shape) == (np.float32, (7, 96 // block))
    assert -(2 ** (bits - 1)) <= codes.min() < 0 < codes.max() < 2 ** (bits - 1)


@pytest.mark.parametrize(("bits", "block"), FORMS)
def test_dequantise_is_code_times_the_scale_of_its_block(bits: int, block: int) -> None:
    quantised = quantise(matrix(), bits, block)
    restored = dequantise(quantised, block)
    for row, column in np.ndindex(7, 96):
        wanted = quantised.codes[row, column] * quantised.scales[row, column // block]
        assert restored[row, column] == wanted


@pytest.mark.parametrize("block", [16, 32])
def test_8_bits_err_by_half_a_step_at_most(block: int) -> None:
    original = matrix()
    quantised = quantise(original, 8, block)
    step = np.repeat(np.abs(original.reshape(7, -1, block)).max(axis=-1) / 127, block, axis=1)
    np.testing.assert_allclose(
        np.repeat(quantised.scales, block, axis=1), step.astype(np.float32), rtol=1e-6
    )
    error = np.abs(dequantise(quantised, block) - original)
    assert (error <= 0.5001 * step).all()


@pytest.mark.parametrize("block", [16, 32])
def test_4_bits_lose_no_more_than_plain_rounding(block: int) -> None:
    """Against the simple rule scale = largest / -8, whose error the search may only lower."""
    original = matrix()
    error = np.square(dequantise(quantise(original, 4, block), block) - original)
    for row, start in np.ndindex(7, 96 // block):
        values = original[row, start * block : (start + 1) * block].astype(np.float64)
        scale = values[np.abs(values).argmax()] / -8
        plain = np.square(np.clip(np.round(values / scale), -8, 7) * scale - values).sum()
        assert error[row, start * block : (start + 1) * block].sum() <= plain * (1 + 1e-5)
    assert np.sqrt(error.mean()) < 0.15 * original.std()


@pytest.mark.parametrize(("bits", "block"), FORMS)
def test_what_the_grid_holds_comes_back_whole(bits: int, block: int) -> None:
    """Multiples of a power of two that reach the end of the grid."""
    top = 127 if bits == 8 else 8
    codes = np.random.default_rng(5).integers(
        -top if bits == 8 else -7, 8, size=(3, 2 * block)
    )
    codes[:, ::block] = -top
    original = (codes * 0.25).astype(np.float32)
    np.testing.assert_array_equal(dequantise(quantise(original, bits, block), block), original)


@pytest.mark.parametrize(("bits", "block"), FORMS)
def test_a_block_of_zeros_stays_zero(bits: int, block: int) -> None:
    original = matrix(2)
    original[1, block : 2 * block] = 0
    quantised = quantise(original, bits, block)
    assert np.isfinite(quantised.scales).all()
    assert not dequantise(quantised, block)[1, block : 2 * block].any()


def test_bytes_are_offset_codes_the_even_one_low() -> None:
    codes = np.array([[-8, 7, 0, -1], [1, 2, 3, -4]], np.int8)
    np.testing.assert_array_equal(pack_bytes(codes, 8), codes.astype(int) + 128)
    assert pack_bytes(codes, 4).tolist() == [[0xF0, 0x78], [0xA9, 0x4B]]


def test_int4_is_twos_complement_the_even_one_low() -> None:
    codes = np.array([[-8, 7, 0], [-1, 1, 5], [3, -4, -2]], np.int8)
    packed = pack_int4(codes)
    assert packed.tolist() == [0x78, 0xF0, 0x51, 0xC3, 0x0E]
    nibbles = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:9].astype(np.int8)
    np.testing.assert_array_equal(np.where(nibbles > 7, nibbles - 16, nibbles), codes.ravel())
