"""150 random programs with a fixed seed; `make fuzz` runs more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.fuzz import SHARES, Fuzz, Score, draw

from cachegraph.models.contract import RowSharing

pytestmark = pytest.mark.r3

SEED, PROGRAMS = 1, 150
OUTCOMES = {
    "accept in ring, direct",
    "accept in delta, direct",
    "accept in shadow, replay",
    "accept in host, replay",
    "prefill, reused",
}


def test_programs_of_sequence_edits_equal_cold_runs(tmp_path: Path) -> None:
    fuzz, score = Fuzz(tmp_path), Score()
    for number in range(PROGRAMS):
        fuzz.play(SEED, number, score)
    fuzz.close()
    assert score.failures == []
    assert score.near_ties == []
    assert score.compared > 3 * PROGRAMS
    assert {name: n for name, n in score.outcomes.items() if n >= 20}.keys() >= OUTCOMES


@pytest.mark.parametrize(
    ("pinned", "raw"),
    [(3, RowSharing.PER_STREAM), (0, RowSharing.UNIFIED), (2, RowSharing.UNIFIED)],
)
def test_so_they_do_with_pinned_and_shared_rows(
    tmp_path: Path, pinned: int, raw: RowSharing
) -> None:
    fuzz, score = Fuzz(tmp_path, pinned=pinned, raw=raw), Score()
    for number in range(30):
        fuzz.play(SEED, number, score)
    fuzz.close()
    assert score.failures == []
    assert score.near_ties == []
    assert score.compared > 90


def test_every_operation_is_drawn() -> None:
    drawn = Counter(o.name for number in range(PROGRAMS) for o in draw(SEED, number, 100))
    assert set(drawn) == set(SHARES)
    assert min(drawn.values()) >= 25
