"""Inverse frequencies against values worked out from the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cachegraph.models.deepseek_v4.config import Rope
from cachegraph.models.deepseek_v4.rope import inverse_frequencies

pytestmark = pytest.mark.r0

FLASH = Rope(theta=160000.0, factor=16.0, original_context=65536)


def test_plain_frequencies():
    frequencies = inverse_frequencies(Rope(theta=10000.0), 6)
    assert frequencies.dtype == np.float32
    wanted = [1.0, 10000 ** (-2 / 6), 10000 ** (-4 / 6)]
    # The exponent is rounded to float32 too: ln(theta) times its rounding may be lost.
    np.testing.assert_allclose(frequencies, wanted, rtol=math.log(10000) * 2**-24)


def test_the_ramp_of_flash_runs_from_pair_15_to_pair_25():
    plain = inverse_frequencies(Rope(theta=160000.0), 64).astype(np.float64)
    share = (plain / inverse_frequencies(FLASH, 64) - 1) / 15  # 0 kept, 1 divided by 16
    np.testing.assert_allclose(share[:16], 0, atol=1e-6)
    np.testing.assert_allclose(share[25:], 1, atol=1e-6)
    middle = plain[20] * 0.5 + plain[20] / 16 * 0.5
    assert inverse_frequencies(FLASH, 64)[20] == pytest.approx(middle, rel=1e-7)


def test_the_ramp_follows_the_number_of_turns():
    """Pairs outside the ramp turn more than beta_fast or less than beta_slow times."""
    plain = inverse_frequencies(Rope(theta=160000.0), 64).astype(np.float64)
    turns = plain * FLASH.original_context / (2 * math.pi)
    scaled = inverse_frequencies(FLASH, 64)
    assert (turns[np.isclose(scaled, plain)] > FLASH.beta_fast * 0.68).all()
    assert (turns[np.isclose(scaled, plain / 16)] < FLASH.beta_slow).all()


def test_a_ramp_without_length_is_a_step():
    rope = Rope(theta=160000.0, factor=2.0, original_context=4, beta_fast=32.0, beta_slow=16.0)
    frequencies = inverse_frequencies(rope, 6)
    plain = inverse_frequencies(Rope(theta=160000.0), 6)
    np.testing.assert_allclose(frequencies[1:], plain[1:] / 2, rtol=1e-6)
