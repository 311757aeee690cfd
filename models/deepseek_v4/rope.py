"""Inverse frequencies of DeepSeek-V4's two RoPE kinds, plain or YaRN.

Pairs are adjacent dims (2i, 2i+1) of the last `rope_head_dim` dims of a head; pair i turns by
position * frequency[i]. Cos and sin are not scaled (attention factor 1).
"""

from __future__ import annotations

from math import ceil, floor, log, pi

import numpy as np

from cachegraph.models.deepseek_v4.config import Rope


def inverse_frequencies(rope: Rope, dims: int) -> np.ndarray:
    """float32 [dims/2], computed in float64.

    YaRN (Peng et al. 2023, "NTK-by-parts" interpolation): pairs that turn more than `beta_fast`
    times over the original context keep their frequency, pairs that turn less than `beta_slow`
    times have it divided by `factor`, and a ramp lies between. The ramp is linear over pair
    indices, its ends rounded outwards to whole indices, as in the authors' code.
    """
    plain = rope.theta ** -(np.arange(0, dims, 2, dtype=np.float64) / dims)
    if rope.factor == 1.0:
        return plain.astype(np.float32)
    low = max(floor(_pair_of(rope.beta_fast, rope, dims)), 0)
    high = min(ceil(_pair_of(rope.beta_slow, rope, dims)), dims - 1)
    width = high - low if high != low else 0.001  # a step where the ramp has no length
    ramp = np.clip((np.arange(dims // 2) - low) / width, 0.0, 1.0)
    return (plain * (1 - ramp) + plain / rope.factor * ramp).astype(np.float32)


def _pair_of(turns: float, rope: Rope, dims: int) -> float:
    """The (fractional) pair index that turns `turns` times over the original context."""
    return dims * log(rope.original_context / (turns * 2 * pi)) / (2 * log(rope.theta))
