"""Coupled tokens: written out per sequence, refused where histories differ."""

from __future__ import annotations

import pytest

from cachegraph.models.errors import BatchError
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.coupled import decoupled

pytestmark = pytest.mark.r0

HELD = {0: (5, 6), 1: (5, 6), 2: (5, 7), 3: ()}


def held(seq: int) -> tuple[int, ...]:
    return HELD[seq]


def test_a_batch_without_coupled_tokens_is_itself() -> None:
    batch = Batch.of([1, 2], [2, 2], [0, 1])
    assert decoupled(batch, held) is batch


def test_a_coupled_token_is_written_out_and_its_logits_wanted_once() -> None:
    batch = Batch.of([1, 2, 3], [2, 3, 3], [(0, 1), 0, 1], logits=[True, False, True])
    parts = decoupled(batch, held)
    assert parts.tokens.tolist() == [1, 1, 2, 3]
    assert parts.positions.tolist() == [2, 2, 3, 3]
    assert parts.seq_ids == ((0,), (1,), (0,), (1,))
    assert parts.wants_logits.tolist() == [True, False, False, True]


@pytest.mark.parametrize("owners", [(0, 2), (2, 1), (0, 1, 2)])
def test_other_tokens_held_are_refused(owners: tuple[int, ...]) -> None:
    with pytest.raises(BatchError, match=r"token 0: coupled token .*different histories"):
        decoupled(Batch.of([1], [2], [owners]), held)


def test_a_difference_inside_the_batch_is_refused() -> None:
    batch = Batch.of([1, 9, 2], [2, 2, 3], [0, 1, (0, 1)])
    with pytest.raises(BatchError, match="token 2"):
        decoupled(batch, held)


def test_equal_tokens_inside_the_batch_are_one_history() -> None:
    batch = Batch.of([9, 9, 2], [2, 2, 3], [0, 1, (0, 1)])
    assert decoupled(batch, held).tokens.tolist() == [9, 9, 2, 2]
