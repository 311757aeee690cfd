"""Random programs over hybrid memory with a fixed seed; `make fuzz FAMILY=qwen4_exp` runs more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.fuzz import Score
from support.hybrid_fuzz import SHARES, Fuzz, draw

from cachegraph.models.contract import RowSharing

pytestmark = pytest.mark.r3

SEED, PROGRAMS = 1, 15


@pytest.mark.parametrize("sharing", RowSharing)
def test_programs_of_sequence_edits_equal_cold_runs(
    tmp_path: Path, sharing: RowSharing
) -> None:
    fuzz, score = Fuzz(tmp_path, sharing), Score()
    for number in range(PROGRAMS):
        fuzz.play(SEED, number, score)
    fuzz.close()
    assert score.failures == []
    assert score.near_ties == []
    assert score.compared > 8 * PROGRAMS
    assert score.outcomes.keys() == SHARES.keys()


def test_every_operation_is_drawn() -> None:
    drawn = Counter(o.name for number in range(200) for o in draw(SEED, number, 100))
    assert set(drawn) == set(SHARES)
    assert min(drawn.values()) >= 25
