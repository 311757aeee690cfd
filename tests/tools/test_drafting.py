"""The figures of drafting, from events."""

from __future__ import annotations

import pytest

from cachegraph.runtime.continuation import DraftCount, Event
from cachegraph.runtime.sampling import Choice
from cachegraph.tools.drafting import drafting_figures, drafting_line

pytestmark = pytest.mark.r0


def events(*texts: tuple[int, DraftCount]) -> list[Event]:
    return [
        Event(
            prompt=prompt,
            choice=Choice(token=3),
            text="",
            finish="length" if last else None,
            drafts=count if last else None,
        )
        for prompt, (tokens, count) in enumerate(texts)
        for last in [False] * (tokens - 1) + [True]
    ]


def test_figures_are_of_all_texts() -> None:
    first = DraftCount(drafted=8, accepted=5, steps=3)
    second = DraftCount(drafted=2, accepted=2, steps=1)
    told = events((9, first), (4, second))
    assert drafting_figures(told) == {
        "drafted": 10,
        "accepted": 7,
        "accepted_share": 0.7,
        "steps": 4,
        "tokens_per_step": 2.75,
    }
    assert drafting_line(told) == "drafted 10, accepted 7 (70.0%), 2.75 tokens per step"


def test_a_text_of_one_token_has_no_shares() -> None:
    told = events((1, DraftCount(drafted=0, accepted=0, steps=0)))
    assert drafting_figures(told)["accepted_share"] is None
    assert drafting_figures(told)["tokens_per_step"] is None
    assert drafting_line(told) == "drafted 0"
