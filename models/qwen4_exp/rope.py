"""Rotary frequencies of Qwen4-Exp: each turns with one of a token's three positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.key_rotation import half_frequencies
from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig


def position_of_frequency(config: Qwen4ExpConfig) -> NDArray[np.int64]:
    """Which position (0 t, 1 y, 2 x) each of the rotary_dim / 2 frequencies uses.

    Interleaved: frequency i uses y where i mod 3 is 1 and x where it is 2, for as many frequencies
    as `mrope_section` gives them; the others use t.
    """
    index = np.arange(config.rotary_dim // 2)
    chosen = np.zeros(index.size, np.int64)
    for place in (1, 2):
        chosen[(index % 3 == place) & (index < 3 * config.mrope_section[place])] = place
    return chosen


def frequency_matrix(config: Qwen4ExpConfig) -> NDArray[np.float32]:
    """[3, rotary_dim] that turns positions into angles; channel i pairs with i + rotary_dim / 2."""
    half = config.rotary_dim // 2
    matrix = np.zeros((3, half), np.float32)
    matrix[position_of_frequency(config), np.arange(half)] = half_frequencies(
        config.rope_theta, config.rotary_dim
    )
    return np.concatenate((matrix, matrix), axis=1)
