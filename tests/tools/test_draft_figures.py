"""What drafting does on the trained model: the same greedy text, in fewer steps."""

from __future__ import annotations

import pytest

from cachegraph.models.export_options import WeightType
from cachegraph.tools.bench.drafting import DraftFigure, draft_table, measure_drafting

pytestmark = pytest.mark.r3


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> list[DraftFigure]:
    return measure_drafting(
        tmp_path_factory.mktemp("drafting"),
        [WeightType.F32, WeightType.INT8],
        lambda line: None,
        drafts=(0, 3),
        new_tokens=64,
        repeats=1,
    )


def test_f32_texts_are_equal_and_steps_give_more_than_two_tokens(
    figures: list[DraftFigure], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print("\n" + "\n".join(draft_table(figures)))
    plain, drafting = (f for f in figures if f.weights is WeightType.F32)
    assert (plain.drafted, plain.steps) == (0, 8 * 64)
    assert drafting.equal == 1
    assert drafting.accepted / drafting.steps > 1
    assert drafting.steps < plain.steps / 2


def test_int8_drafts_too(figures: list[DraftFigure]) -> None:
    """Its texts may part where two tokens are close: the step's width moves int8 logits."""
    drafting = next(f for f in figures if f.weights is WeightType.INT8 and f.draft)
    assert drafting.accepted / drafting.steps > 1
    assert drafting.equal > 0.5
