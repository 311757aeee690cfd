"""Ubatches: which tokens share a call, and where a sequence is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachegraph.models.buckets import BucketLadder
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.split import UBatch, split_batch, step_size

pytestmark = pytest.mark.r0

LADDER = BucketLadder(streams=(1, 2, 3), steps=(1, 4, 16, 64, 128), contexts=(8,))


def split(counts: dict[int, int], starts: dict[int, int] | None = None) -> list[UBatch]:
    owners = [seq for seq, count in counts.items() for _ in range(count)]
    return list(split_batch(Batch.of([5] * len(owners), None, owners, starts=starts), LADDER))


def edges(parts: list[UBatch], seq: int) -> list[tuple[int, int]]:
    """(first position, tokens) of each chunk of a sequence."""
    found = []
    for part in parts:
        if seq in part.streams:
            row = part.streams.index(seq) * part.step
            found.append((int(part.positions[row]), part.step))
    return found


@pytest.mark.parametrize(
    ("count", "step"),
    [(1, 1), (2, 2), (4, 4), (7, 4), (8, 8), (16, 16), (31, 16), (33, 33), (65, 65), (97, 97)],
)
def test_a_step_is_padded_by_at_most_half(count: int, step: int) -> None:
    assert step_size(count, LADDER.steps) == step


def test_a_ladder_without_a_small_step_still_serves_one_token() -> None:
    assert step_size(1, (8,)) == 1


def test_long_runs_are_cut_at_absolute_multiples_of_the_longest_step() -> None:
    assert edges(split({0: 300}), 0) == [(0, 128), (128, 128), (256, 44)]
    assert edges(split({0: 200}, {0: 100}), 0) == [(100, 16), (116, 12), (128, 128), (256, 44)]


def test_a_run_of_one_step_is_not_cut_at_an_edge() -> None:
    assert edges(split({0: 4}, {0: 126}), 0) == [(126, 4)]


def test_neighbours_do_not_move_a_sequences_edges() -> None:
    alone = edges(split({2: 190}), 2)
    assert edges(split({0: 7, 1: 300, 2: 190}), 2) == alone


def test_equal_chunks_share_a_call_in_order_of_sequence_ids() -> None:
    parts = split({2: 1, 0: 1, 1: 1})
    assert [(part.streams, part.step) for part in parts] == [((0, 1, 2), 1)]


def test_more_sequences_than_streams_take_more_calls() -> None:
    parts = split(dict.fromkeys(range(7), 1))
    assert [len(part.streams) for part in parts] == [3, 3, 1]


def test_a_tail_joins_a_sequence_that_starts_there() -> None:
    parts = split({0: 44, 1: 128 + 44})
    assert [(part.streams, part.step) for part in parts] == [((1,), 128), ((0, 1), 44)]


@settings(max_examples=100, derandomize=True, deadline=None)
@given(owners=st.lists(st.integers(0, 4), min_size=1, max_size=300))
def test_every_token_once_and_each_sequence_in_order(owners: list[int]) -> None:
    batch = Batch.of(range(len(owners)), None, owners)
    parts = split_batch(batch, LADDER)
    seen: list[int] = []
    for part in parts:
        assert part.step <= 128
        assert len(part.streams) <= 3
        assert len(set(part.streams)) == len(part.streams)
        assert part.source.size == part.step * len(part.streams)
        assert part.tokens.tolist() == part.source.tolist()
        for i, row in enumerate(part.source.tolist()):
            assert owners[row] == part.streams[i // part.step]
            assert part.positions[i] == batch.positions[row]
        seen += part.source.tolist()
    assert sorted(seen) == list(range(len(owners)))
    for seq in set(owners):
        own = [row for row in seen if owners[row] == seq]
        assert own == sorted(own)
