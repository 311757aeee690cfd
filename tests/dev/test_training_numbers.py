"""Windows, schedule and loss curve: the arithmetic around training, without torch."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from cachegraph.tools.dev.tiny.figures import loss_curve
from cachegraph.tools.dev.tiny.schedule import EVERYTHING, Budget, LogRow, Recipe
from cachegraph.tools.dev.tiny.windows import windows

pytestmark = pytest.mark.r0


@pytest.mark.parametrize("length", [2, 3, 16, 17, 18, 33, 100])
@pytest.mark.parametrize("stride", [5, 11, 16])
def test_windows_score_every_token_but_bos_once(length: int, stride: int) -> None:
    """Targets 1 .. length-1 in order, inputs within size, later windows with enough context."""
    size = 16
    cut = list(windows(length, size=size, stride=stride))
    scored = [t for w in cut for t in range(w.first, w.end + 1)]
    assert scored == list(range(1, length))
    assert all(0 < w.end - w.start <= size for w in cut)
    assert all(w.first - w.start > size - stride for w in cut[1:])


def test_a_file_of_bos_alone_has_no_window() -> None:
    """Nothing to score."""
    assert list(windows(1, size=16, stride=8)) == []


def test_phases_switch_at_their_shares() -> None:
    """Dense until 45%, sparse until 80%, then long."""
    recipe = Recipe()
    names = [recipe.phase(p).name for p in (0.0, 0.449, 0.45, 0.799, 0.8, 0.999)]
    assert names == ["dense", "dense", "sparse", "sparse", "long", "long"]
    assert recipe.phase(0.0).topk == EVERYTHING


def test_rate_warms_up_then_falls_to_its_floor() -> None:
    """The peak is reached after the warm-up and 5% of it is left at the end."""
    recipe = Recipe()
    assert recipe.rate(0, 0.0) == pytest.approx(recipe.peak_rate / 60)
    assert recipe.rate(59, 0.0) == pytest.approx(recipe.peak_rate)
    assert recipe.rate(1000, 1.0) == pytest.approx(0.05 * recipe.peak_rate)


def test_a_budget_of_steps_ends_after_them() -> None:
    """Progress counts steps done, whatever the clock says."""
    budget = Budget(steps=4)
    assert [budget.progress(step) for step in range(5)] == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize(("steps", "minutes"), [(None, None), (3, 2.0)])
def test_a_budget_is_steps_or_minutes(steps: int | None, minutes: float | None) -> None:
    """Neither and both are refused."""
    with pytest.raises(ValueError, match="steps or minutes"):
        Budget(steps=steps, minutes=minutes)


def test_loss_curve_is_well_formed_and_inside_its_frame() -> None:
    """One point per row on each line; later and lower values lie further right and down."""
    rows = [
        LogRow(200, 9.0, 3.4, 1.97),
        LogRow(400, 18.0, 3.0, 1.8),
        LogRow(500, 20.0, 2.9, 1.6),
    ]
    svg = ET.fromstring(loss_curve(rows, "a <title> & more"))
    space = "{http://www.w3.org/2000/svg}"
    lines = {
        line.get("class"): line.get("points", "") for line in svg.iter(f"{space}polyline")
    }
    held = [tuple(map(float, pair.split(","))) for pair in lines["held"].split()]
    assert set(lines) == {"held", "batch"}
    assert len(held) == len(rows)
    assert held == sorted(held)
    assert [y for _, y in held] == sorted(y for _, y in held)
    assert all(0 < x < 640 and 0 < y < 320 for x, y in held)


def test_a_last_point_set_apart_is_a_dot_off_the_line() -> None:
    """It was measured on other text, so the line would tell a fall that was not there."""
    rows = [
        LogRow(200, 9.0, 3.4, 1.97),
        LogRow(400, 18.0, 3.0, 1.8),
        LogRow(500, 20.0, 2.9, 1.6),
    ]
    joined, apart = (loss_curve(rows, "t", last_apart=flag) for flag in (False, True))
    assert joined.count("<circle") == apart.count("<circle") == 2 * len(rows)
    assert joined.count(",") == apart.count(",") + 1  # one x,y pair of a polyline
