"""What sampling is judged by: final distributions by plain loops, and the chi-square test."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cachegraph.runtime.sampling import SamplingOptions


def reference(row: np.ndarray, options: SamplingOptions, history: Sequence[int]) -> np.ndarray:
    """Final distribution by plain loops, in the documented order."""
    logits = [float(x) for x in row]
    for token in set(history):
        x, penalty = logits[token], options.repetition_penalty
        logits[token] = x / penalty if x > 0 else x * penalty
    logits = [x / options.temperature for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if options.top_k:
        order = order[: options.top_k]
    weights = {i: math.exp(logits[i] - logits[order[0]]) for i in order}
    weights = {i: w for i, w in weights.items() if w >= options.min_p}
    total, mass, kept = sum(weights.values()), 0.0, []
    for i in order:
        if i in weights and (mass < options.top_p * total or not kept):
            kept.append(i)
            mass += weights[i]
    probabilities = np.zeros(len(logits))
    probabilities[kept] = [weights[i] / mass for i in kept]
    return probabilities


def fits(tokens: Sequence[int], probabilities: np.ndarray) -> bool:
    """Whether draws of these tokens pass a chi-square test at 99.9 %.

    A token of probability 0 fails. The quantile is Wilson and Hilferty's (1931), a per mille off.
    """
    observed = np.bincount(tokens, minlength=probabilities.size)
    expected = probabilities * len(tokens)
    live = expected > 0
    assert expected[live].min() >= 5, "too few draws for the test"
    if observed[~live].any():
        return False
    freedom = int(live.sum()) - 1
    if freedom == 0:
        return True
    statistic = ((observed - expected)[live] ** 2 / expected[live]).sum()
    spread = 2 / (9 * freedom)
    return bool(statistic < freedom * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3)
