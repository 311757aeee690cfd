"""Speculative sampling: whether a drafted token stands, and what takes its place.

Pure rules over two distributions: q, which the draft was drawn from, and p, which the model would
have drawn from at that position. The token that results is distributed as p whatever q is
(Leviathan et al. 2023, arXiv:2211.17192, theorem 3.5; Chen et al. 2023, arXiv:2302.01318). Greedy
choice is the case in which p is one token: a draft stands if it is that token. Knows nothing of
engines, logits or filters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cachegraph.runtime.distribution import Distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A drafted token, and the distribution q that it was drawn from."""

    token: int
    law: Distribution


def settle(draft: Draft, target: Distribution, uniform: Callable[[], float]) -> int:
    """The token of a drafted position, distributed as `target`; the draft stands if it is it.

    It stands with probability min(1, p / q), else the token is drawn from what q left of p, where
    the draft has no share. `uniform` gives numbers from 0 to 1 (excluded); it is asked only where
    chance decides.
    """
    token = np.array(draft.token)
    p, q = float(target.probabilities(token)), float(draft.law.probabilities(token))
    if p >= q or (p > 0 and uniform() * q < p):
        return draft.token
    return residual(target, draft.law).draw(uniform())


def residual(target: Distribution, drafted: Distribution) -> Distribution:
    """The positive part of p - q, on the ids of p.

    Where rounding leaves nothing of it, p and q are the same, and p takes its place.
    """
    left = target.probabilities(target.ids) - drafted.probabilities(target.ids)
    weights = np.maximum(left, 0.0)
    return Distribution(ids=target.ids, weights=weights) if weights.any() else target
