"""Inverse frequencies of DeepSeek-V4's two RoPE kinds, plain or YaRN.

Pairs are adjacent dims (2i, 2i+1) of the last `rope_head_dim` dims of a head; pair i turns by
position * frequency[i]. Cos and sin are not scaled (attention factor 1).
"""

from __future__ import annotations

from math import ceil, floor, log, pi

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.deepseek_v4.config import Rope


def inverse_frequencies(rope: Rope, dims: int) -> NDArray[np.float32]:
    """float32 [dims/2], rounded to float32 at each step as the published code rounds.

    The roundings matter: at position p an error of one part in 10^7 turns a pair by p * 10^-7, so
    exact frequencies would drift from what the weights were trained with.

    YaRN (Peng et al. 2023, "NTK-by-parts" interpolation): pairs that turn more than `beta_fast`
    times over the original context keep their frequency, pairs that turn less than `beta_slow`
    times have it divided by `factor`, and a ramp lies between. The ramp is linear over pair
    indices, its ends rounded outwards to whole indices, as in the authors' code.
    """
    one = np.float32(1)
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    periods = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    plain = one / periods
    if rope.factor == 1.0:
        return plain
    low = max(floor(_pair_of(rope.beta_fast, rope, dims)), 0)
    high = min(ceil(_pair_of(rope.beta_slow, rope, dims)), dims - 1)
    width = high - low if high != low else 0.001  # a step where the ramp has no length
    pairs = np.arange(dims // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(width), 0, 1)
    slowed = one / (np.float32(rope.factor) * periods)
    kept = one - ramp
    mixed: NDArray[np.float32] = slowed * (one - kept) + plain * kept
    return mixed


def _pair_of(turns: float, rope: Rope, dims: int) -> float:
    """The (fractional) pair index that turns `turns` times over the original context."""
    return dims * log(rope.original_context / (turns * 2 * pi)) / (2 * log(rope.theta))
