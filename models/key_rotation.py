"""How cached keys are rotated, so that a host can turn those of tokens that get other positions.

Channels i and i + rotary_dim / 2 of each head form a pair, of the first rotary_dim channels; a pair
turns by position times its frequency.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def half_frequencies(theta: float, dims: int) -> NDArray[np.float32]:
    """theta ** (-2i / dims), rounded as the published code does: [dims / 2] float32."""
    exponents = np.arange(0, dims, 2).astype(np.float32) / np.float32(dims)
    periods = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    plain: NDArray[np.float32] = np.float32(1) / periods
    return plain


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRotation:
    """Rows of heads * head_dim values; of each head the first rotary_dim are rotated."""

    heads: int
    head_dim: int
    rotary_dim: int
    theta: float

    def turned(
        self, rows: NDArray[np.float32], steps: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Rows [n, width] of tokens that move by `steps` [n] positions."""
        half = self.rotary_dim // 2
        angles = steps[:, None] * half_frequencies(self.theta, self.rotary_dim).astype(float)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]  # [n, 1, half]
        heads = rows.reshape(len(rows), self.heads, self.head_dim).astype(float)
        first, second = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
        heads[..., :half] = first * cos - second * sin
        heads[..., half : 2 * half] = second * cos + first * sin
        return heads.reshape(rows.shape).astype(np.float32)
