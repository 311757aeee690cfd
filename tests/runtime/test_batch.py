"""What a batch may be: builders, and every refusal with the token it names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cachegraph.models.errors import BatchError, CapacityError
from cachegraph.runtime.batch import Batch, check_batch

pytestmark = pytest.mark.r0


def check(batch: Batch, **changes: Any) -> None:
    limits: dict[str, Any] = {
        "vocab_size": 50,
        "context": 10,
        "sequences": 3,
        "next_positions": {0: 4, 1: 0},
    }
    check_batch(batch, **(limits | changes))


def test_defaults_are_sequence_0_counted_on_and_its_last_token_wanted() -> None:
    batch = Batch.of([7, 8, 9], starts={0: 4})
    assert batch.positions.tolist() == [4, 5, 6]
    assert batch.seq_ids == ((0,), (0,), (0,))
    assert batch.wants_logits.tolist() == [False, False, True]
    check(batch)


def test_interleaved_sequences_count_apart_and_each_wants_its_last() -> None:
    batch = Batch.of(np.array([1, 2, 3, 4], np.int32), None, [1, 0, 1, 2], starts={0: 4})
    assert batch.positions.tolist() == [0, 4, 1, 0]
    assert batch.wants_logits.tolist() == [False, True, True, True]
    assert {s: r.tolist() for s, r in batch.rows_of_sequences().items()} == {
        1: [0, 2],
        0: [1],
        2: [3],
    }
    check(batch)


def test_one_flag_serves_all_tokens() -> None:
    assert Batch.of([1, 2], logits=True).wants_logits.tolist() == [True, True]


def test_the_callers_array_is_not_kept() -> None:
    tokens = np.array([1, 2])
    batch = Batch.of(tokens)
    tokens[0] = 9
    assert batch.tokens.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.5],), r"tokens must be one list of integers, got shape \(1,\) of float64"),
        (([[1], [2]],), r"tokens must be one list of integers, got shape \(2, 1\)"),
        (([1, 2], [0]), "positions has 1 entries for 2 tokens"),
        (([1, 2], None, [0]), "seq_ids has 1 entries for 2 tokens"),
        (([1, 2], None, None, [1]), "logits has 1 entries for 2 tokens"),
        (([1], None, None, ["x"]), "logits must be one flag or a list of them"),
    ],
)
def test_malformed_batches_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Batch.of(*arguments)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch.of([]), "the batch is empty"),
        (Batch.of([1, 50], [4, 5]), "token 1: id 50 is not in the vocabulary, .* ids 0 to 49"),
        (Batch.of([-1], [4]), "token 0: id -1 is not in the vocabulary"),
        (Batch.of([1, 1], [-1, 0]), "token 0: position -1 is negative"),
        (Batch.of([1], [6]), "token 0: gap in sequence 0: position 6, wanted 4"),
        (Batch.of([1], [3]), "token 0: repeat in sequence 0: position 3, wanted 4"),
        (Batch.of([1, 1], [4, 4]), "token 1: repeat in sequence 0: position 4, wanted 5"),
        (Batch.of([1], [1]), "token 0: step back in sequence 0: position 1, wanted 4"),
        (Batch.of([1, 1], [0, 2], [2, 2]), "token 1: gap in sequence 2: position 2, wanted 1"),
        (
            Batch.of([1], [0], [3]),
            "token 0: unknown sequence 3; this engine has sequences 0 to 2",
        ),
        (Batch.of([1], [0], [-1]), "token 0: unknown sequence -1"),
        (Batch.of([1, 1], [4, 5], [0, ()]), "token 1: belongs to no sequence"),
    ],
)
def test_a_broken_rule_names_the_token(batch: Batch, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        check(batch)


def test_the_context_may_be_filled_exactly() -> None:
    check(Batch.of([1] * 6, range(4, 10)))
    with pytest.raises(
        CapacityError,
        match="token 6: sequence 0 is full: 4 of 10 positions are taken, 7 tokens were sent, 6 fit",
    ):
        check(Batch.of([1] * 7, range(4, 11)))
    with pytest.raises(
        CapacityError, match="10 of 10 positions are taken, 1 tokens were sent, 0"
    ):
        check(Batch.of([1], [10]), next_positions={0: 10})
