"""What the float64 twins of all families have in common: tensors by name, softmax, top-k with gaps.

Plain numpy; shares nothing with the builder or the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from cachegraph.models.errors import CheckpointError

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class Tensors:
    """Tensors by published name, seen from a prefix such as `layers.0.attn.`."""

    def __init__(
        self, arrays: Mapping[str, npt.NDArray[np.generic]], prefix: str = ""
    ) -> None:
        self._arrays = arrays
        self._prefix = prefix

    def under(self, name: str) -> Tensors:
        """The same tensors seen from one level further down."""
        return Tensors(self._arrays, f"{self._prefix}{name}.")

    def floats(self, name: str) -> Floats:
        """A tensor as float64; CheckpointError where there is none of that name."""
        return self._find(name).astype(np.float64, copy=False)

    def ids(self, name: str) -> Ids:
        """A tensor as int64; CheckpointError where there is none of that name."""
        return self._find(name).astype(np.int64, copy=False)

    def linear(self, x: Floats, name: str) -> Floats:
        """x [..., in] times the transposed matrix `name.weight` [out, in]."""
        return np.asarray(x @ self.floats(f"{name}.weight").T)

    def _find(self, name: str) -> npt.NDArray[np.generic]:
        full = self._prefix + name
        if full not in self._arrays:
            raise CheckpointError(
                f"the twin needs tensor {full!r}, which is not in the weights"
            )
        return self._arrays[full]


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)) without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)))


def softmax(x: Floats, axis: int) -> Floats:
    """Softmax along one axis."""
    weights = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(weights / weights.sum(axis=axis, keepdims=True))


def rms_norm(x: Floats, eps: float, weight: Floats | None = None) -> Floats:
    """x over the root of its mean square on the last axis, times a weight if there is one."""
    normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return np.asarray(normed if weight is None else normed * weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The best k of some scores, best first, and how far the last is above the first left out.

    The gap is infinite where nothing was left out.
    """

    ids: Ids
    gap: float


def choose(scores: Floats, k: int) -> Choice:
    """Higher score first, then lower index; scores [n], all of them where n <= k."""
    order = np.argsort(-scores, kind="stable")
    gap = float(scores[order[k - 1]] - scores[order[k]]) if len(order) > k else inf
    return Choice(ids=order[:k].astype(np.int64), gap=gap)
