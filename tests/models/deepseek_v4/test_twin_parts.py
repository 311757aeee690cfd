"""The twin's parts against what the equations promise, without a model."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from cachegraph.models.deepseek_v4.config import Rope
from cachegraph.models.deepseek_v4.twin_parts import (
    attend,
    inverse_frequencies,
    rotate,
    sinkhorn,
)
from cachegraph.models.errors import CheckpointError
from cachegraph.models.twin_tools import Tensors, choose

pytestmark = pytest.mark.r0

FLASH = Rope(theta=1.6e5, factor=16.0, original_context=65536)


def test_yarn_blends_pairs_15_to_25_of_the_flash_rope() -> None:
    """Faster pairs are as without YaRN, slower ones 16 times slower, those between blended."""
    plain = inverse_frequencies(Rope(theta=1.6e5), 64)
    slowdown = plain / inverse_frequencies(FLASH, 64)
    np.testing.assert_allclose(slowdown[:16], 1.0)
    np.testing.assert_allclose(slowdown[25:], 16.0)
    assert (np.diff(slowdown[15:26]) > 0).all()
    np.testing.assert_allclose(1 / slowdown[20], (1 + 1 / 16) / 2)


def test_rope_turns_adjacent_pairs_of_the_last_channels_only() -> None:
    """A quarter turn sends (1, 0) to (0, 1) and leaves the first channels alone."""
    x = np.array([[5.0, 1.0, 0.0, 0.0, 2.0]])
    turned = rotate(x, np.array([[np.pi / 2, np.pi]]))
    np.testing.assert_allclose(turned, [[5.0, 0.0, 1.0, 0.0, -2.0]], atol=1e-15)


def test_rope_products_depend_on_distance_only() -> None:
    """Turned query and key meet as at their distance, and minus the angle undoes a turn."""
    rng = np.random.default_rng(3)
    query, key = rng.normal(size=(2, 1, 10))
    frequencies = inverse_frequencies(Rope(theta=100.0), 6)

    def at(x: np.ndarray, position: int) -> np.ndarray:
        return rotate(x, position * frequencies[None])

    near = at(query, 7) @ at(key, 4).T
    np.testing.assert_allclose(near, at(query, 1007) @ at(key, 1004).T)
    np.testing.assert_allclose(at(at(query, 7), -7), query)


def test_sinkhorn_is_doubly_stochastic_with_columns_last() -> None:
    """After 20 rounds rows and columns sum to 1; after one round only columns do."""
    logits = np.random.default_rng(5).normal(size=(3, 4, 4))
    mixed = sinkhorn(logits, 20, 1e-6)
    np.testing.assert_allclose(mixed.sum(axis=2), 1.0, atol=1e-4)
    np.testing.assert_allclose(mixed.sum(axis=1), 1.0, atol=2e-6)
    once = sinkhorn(logits, 1, 1e-6)
    np.testing.assert_allclose(once.sum(axis=1), 1.0, atol=2e-6)
    assert abs(once.sum(axis=2) - 1.0).max() > 1e-2


def test_choose_takes_higher_scores_then_lower_indices() -> None:
    """Equal scores come in index order, and a tie at the cut is a gap of 0."""
    tied = choose(np.array([1.0, 2.0, 1.0, 2.0, 1.0]), 3)
    assert tied.ids.tolist() == [1, 3, 0]
    assert tied.gap == 0.0
    clear = choose(np.array([0.5, 2.0, 1.25]), 2)
    assert clear.ids.tolist() == [1, 2]
    assert clear.gap == 0.75


def test_choose_takes_all_where_there_are_no_more_than_k() -> None:
    """Nothing left out, so no equality is at risk."""
    assert choose(np.array([1.0, 3.0]), 2).gap == inf
    assert choose(np.zeros(0), 2).ids.tolist() == []


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    """One row under a sink of the same score counts half; under -inf it counts whole."""
    row = np.array([[2.0, 0.0]])
    query = np.zeros((1, 2))
    np.testing.assert_allclose(attend(query, row, np.array([0.0])), [[1.0, 0.0]])
    np.testing.assert_allclose(attend(query, row, np.array([-inf])), [[2.0, 0.0]])


def test_a_missing_tensor_is_named_in_full() -> None:
    """The error gives the published name, not the last part of it."""
    tensors = Tensors({}).under("layers.3").under("attn")
    with pytest.raises(CheckpointError, match=r"layers\.3\.attn\.wq_a\.weight"):
        tensors.floats("wq_a.weight")
