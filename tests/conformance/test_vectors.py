"""The recorded scenarios: every list equal, or told apart by a numbered rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachegraph.models.errors import ConfigError
from cachegraph.tools.conformance.checkpoint_rules import RULE_11
from cachegraph.tools.conformance.report import VectorReport, run_vectors
from cachegraph.tools.conformance.rules import RULES

pytestmark = pytest.mark.r0

VECTORS = Path(__file__).parents[1] / "data" / "dsv4_plan.json"


@pytest.fixture(scope="module")
def report() -> VectorReport:
    return run_vectors(VECTORS)


def test_every_recorded_scenario_matches_or_deviates_by_rule(report: VectorReport) -> None:
    lines = list(report.lines())
    assert report.is_ok, lines
    assert lines[-1] == "218 match, 0 differ, 67 deviate on purpose"
    assert not any("not run" in line for line in lines)


def test_every_rule_but_one_is_met_by_a_recorded_scenario(report: VectorReport) -> None:
    """Rule 18 (an id listed twice closes a block once) is met by none of this file."""
    used = {number for _, numbers in report.deviations for number in numbers}
    assert used == {rule.number for rule in (*RULES, RULE_11)} - {18}


def first_of_kind(kind: str) -> dict[str, object]:
    scenarios = json.loads(VECTORS.read_text())["scenarios"]
    found: dict[str, object] = next(s for s in scenarios if s["kind"] == kind)
    return found


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (("comp", 0, "plan", "n_kv"), "comp[0].plan.n_kv"),
        (("raw", "raw", "n_kv"), "raw.raw.n_kv"),
        (("graph_n_stream",), "graph_n_stream"),
    ],
)
def test_a_wrong_number_is_one_line_and_a_failure(
    tmp_path: Path, path: tuple[str | int, ...], field: str
) -> None:
    scenario = first_of_kind("decode")
    place: object = scenario["out"]
    for key in path[:-1]:
        place = place[key]  # type: ignore[index]
    place[path[-1]] += 1000  # type: ignore[index]
    file = tmp_path / "vectors.json"
    file.write_text(json.dumps({"scenarios": [scenario]}))
    report = run_vectors(file)
    lines = list(report.lines())
    assert not report.is_ok
    assert lines[0].startswith(f"{scenario['id']} decode {field}: got ")
    assert lines[-1] == "0 match, 1 differ, 0 deviate on purpose"


def test_a_deviation_covers_its_own_fields_only(tmp_path: Path) -> None:
    """In an unequal batch the raw plan may differ; a helper field may not."""
    scenario = first_of_kind("multi_unequal")
    scenario["out"]["shape"] = [7, 7]  # type: ignore[index]
    file = tmp_path / "vectors.json"
    file.write_text(json.dumps({"scenarios": [scenario]}))
    (difference,) = run_vectors(file).differences
    assert difference.field == "shape"


def test_a_file_that_holds_no_vectors_is_named(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"other\.json: not a file of planner vectors"):
        run_vectors(file)
