"""A distribution over token ids: what a sampler draws from.

Knows nothing of logits, filters or random streams: a draw is told its random number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Some token ids, int64 [n] ascending, and their weights, float64 [n] >= 0, unnormalised.

    Any other token has probability 0. At least one weight is positive.
    """

    ids: Ids
    weights: Floats

    def probabilities(self, tokens: NDArray[np.integer[Any]]) -> Floats:
        """The probability of each of these ids, float64 in the shape of `tokens`."""
        places = np.minimum(np.searchsorted(self.ids, tokens), self.ids.size - 1)
        weights = np.where(self.ids[places] == tokens, self.weights[places], 0.0)
        shares: Floats = weights / self.weights.sum()
        return shares

    def draw(self, uniform: float) -> int:
        """The token at a random number from 0 (included) to 1 (excluded)."""
        mass = np.cumsum(self.weights)
        # 'right' skips tokens of weight 0: the first sum above the draw belongs to a live one.
        return int(self.ids[np.searchsorted(mass, uniform * mass[-1], side="right")])
