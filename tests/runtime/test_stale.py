"""Stale marks: the rule of each edit."""

from __future__ import annotations

import pytest

from cachegraph.runtime.stale import EVERY, StaleMarks

pytestmark = pytest.mark.r0

FIRSTS = {0: 2, 1: 0}  # sequence 2 is empty


@pytest.fixture
def stale() -> StaleMarks:
    return StaleMarks(3)


@pytest.mark.parametrize(
    ("sequence", "start", "wanted"),
    [
        (0, 7, {0: 7}),
        (0, 3, {0: 3}),
        (0, 2, {0: 0}),
        (0, -1, {0: 0}),
        (2, 6, {2: 6}),
        (2, -1, {2: 0}),
        (EVERY, 5, {0: 0, 1: 0, 2: 0}),
    ],
)
def test_a_removal_marks_from_its_start(
    stale: StaleMarks, sequence: int, start: int, wanted: dict[int, int]
) -> None:
    """All of it at or below the first position; even where the range holds nothing."""
    stale.removed(sequence, start, FIRSTS)
    assert stale.marks() == wanted


@pytest.mark.parametrize(
    ("start", "delta", "wanted"), [(7, 3, 7), (7, -3, 4), (7, -5, 0), (2, 3, 0), (3, 1, 3)]
)
def test_a_shift_marks_from_where_tokens_leave_or_land(
    stale: StaleMarks, start: int, delta: int, wanted: int
) -> None:
    stale.shifted(0, start, delta, FIRSTS)
    assert stale.marks() == {0: wanted}


def test_copies_divisions_and_resets(stale: StaleMarks) -> None:
    stale.copied(2)
    assert stale.marks() == {2: 0}
    stale.replaced(1)
    assert stale.marks() == {1: 0, 2: 0}
    stale.reset()
    assert stale.marks() == {0: 0, 1: 0, 2: 0}


def test_marks_combine_by_minimum_and_are_cleared_one_by_one(stale: StaleMarks) -> None:
    for start in (7, 4, 9):
        stale.removed(0, start, FIRSTS)
    stale.removed(1, 5, FIRSTS)
    assert stale.marks() == {0: 4, 1: 5}
    stale.clear([0])
    assert stale.marks() == {1: 5}
