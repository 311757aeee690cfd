"""Generation with drafts says what it says without: every ending, any share of right drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.chances import fits, reference
from support.draft_engine import EOS, DraftEngine

from cachegraph.models.errors import ConfigError, LogitsError
from cachegraph.models.shipped import resolve
from cachegraph.runtime.continuation import Event, GenerateOptions
from cachegraph.runtime.generate import generate
from cachegraph.runtime.sampling import SamplingOptions
from cachegraph.runtime.text import TextCodec

pytestmark = pytest.mark.r0

PROMPTS = [[1, 2, 3], [4], [5, 6, 8, 9, 10], [11, 12], [13]]
SHARES = [0.0, 0.5, 1.0]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(resolve("tiny:deepseek_v4"))


def run(
    engine: DraftEngine, prompts: Sequence[Sequence[int]], codec: Any = None, **options: Any
) -> list[list[Event]]:
    """The events of each prompt, whose sequences are all free again."""
    events: list[list[Event]] = [[] for _ in prompts]
    for event in generate(engine, prompts, GenerateOptions(**options), codec):
        events[event.prompt].append(event)
    assert not any(engine.held.values())
    return events


def shown(events: Sequence[Sequence[Event]]) -> list[list[tuple[Any, ...]]]:
    """All of the events but what they say of drafts."""
    return [[(e.choice, e.text, e.finish) for e in mine] for mine in events]


@pytest.mark.parametrize("right", SHARES)
@pytest.mark.parametrize("draft", [1, 2, 5])
@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_greedy_text_is_that_without_drafts(right: float, draft: int, penalty: float) -> None:
    """Five prompts in three sequences; each ends where it ended, with its log-probabilities."""
    sampling = SamplingOptions(repetition_penalty=penalty, logprobs=2)
    options = {"max_tokens": 24, "sampling": sampling}
    plain = run(DraftEngine(right=right), PROMPTS, **options)
    engine = DraftEngine(right=right)
    assert shown(run(engine, PROMPTS, **options, draft=draft)) == shown(plain)
    assert engine.drafted
    assert bool(engine.removed) == (right < 1)


def test_sequences_of_one_step_accept_unequal_counts() -> None:
    engine = DraftEngine(right=0.5)
    events = run(engine, PROMPTS, max_tokens=24, draft=3, ignore_eos=True)
    assert {1, 2, 3} <= set(engine.removed)
    assert len({mine[-1].drafts for mine in events}) > 1


@pytest.mark.parametrize("right", SHARES)
@pytest.mark.parametrize("prompt", range(28, 41))
def test_the_context_ends_a_text_at_every_offset(right: float, prompt: int) -> None:
    """Neither draft nor step passes the end; the last token is chosen and never decoded."""
    prompts = [[1 + token % 5 for token in range(prompt)], [2, 3]]
    options = {"max_tokens": 60, "ignore_eos": True}
    plain = run(DraftEngine(right=right), prompts, **options)
    drafted = run(DraftEngine(right=right), prompts, **options, draft=5)
    assert shown(drafted) == shown(plain)
    assert drafted[0][-1].finish == "context"
    assert len(drafted[0]) == 41 - prompt


@pytest.mark.parametrize("right", SHARES)
@pytest.mark.parametrize("count", range(1, 13))
def test_length_ends_a_text_at_every_offset(right: float, count: int) -> None:
    engine = DraftEngine(right=right)
    (events,) = run(engine, [[3, 1]], max_tokens=count, ignore_eos=True, draft=4)
    assert len(events) == count
    assert events[-1].finish == "length"
    if right == 1:  # the prompt's own call and steps of five, the last as long as need be
        assert len(engine.batches) == 1 + -(-(count - 1) // 5)
        assert engine.removed == []


def test_eos_among_the_drafts_ends_a_text() -> None:
    """At every place behind the newest token, with tokens behind it that are dropped."""
    places = set()
    for number in range(60):
        prompt = [1, number % 19, number // 19]
        options = {"max_tokens": 30, "sampling": SamplingOptions(logprobs=0)}
        plain = run(DraftEngine(right=1.0), [prompt], **options)
        (events,) = drafted = run(DraftEngine(right=1.0), [prompt], **options, draft=4)
        assert shown(drafted) == shown(plain)
        if events[-1].finish == "eos":
            assert events[-1].choice.token == EOS
            places.add((len(events) - 2) % 5)
    assert places == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("right", SHARES)
def test_stop_strings_end_a_text_among_accepted_tokens(codec: TextCodec, right: float) -> None:
    """Every piece of the text as a stop string, across tokens and within one."""
    sizes = {"vocab": codec.vocab_size, "right": right}
    options = {"max_tokens": 14, "ignore_eos": True}
    (whole,) = run(DraftEngine(**sizes), [[40, 41]], codec, **options)
    text = "".join(event.text for event in whole)
    for start in range(0, len(text) - 3, 3):
        stop = (text[start : start + 3],)
        plain = run(DraftEngine(**sizes), [[40, 41]], codec, **options, stop=stop)
        drafted = run(DraftEngine(**sizes), [[40, 41]], codec, **options, stop=stop, draft=4)
        assert shown(drafted) == shown(plain)
        assert drafted[0][-1].finish == "stop"


def test_counts_are_of_the_text_and_its_steps() -> None:
    (right,) = run(DraftEngine(right=1.0), [[3]], max_tokens=12, draft=4, ignore_eos=True)
    (wrong,) = run(DraftEngine(right=0.0), [[3]], max_tokens=12, draft=4, ignore_eos=True)
    for events, figures in ((right, (8, 8, 3)), (wrong, (34, 0, 11))):
        assert [event.drafts for event in events[:-1]] == [None] * 11
        counts = events[-1].drafts
        assert counts is not None
        assert (counts.drafted, counts.accepted, counts.steps) == figures
    (plain,) = run(DraftEngine(right=1.0), [[3]], max_tokens=12)
    assert plain[-1].drafts is None


def test_an_accepted_end_counts_and_what_is_behind_it_does_not() -> None:
    for number in range(60):
        engine = DraftEngine(right=1.0)
        (events,) = run(engine, [[1, number % 19, number // 19]], max_tokens=30, draft=4)
        counts = events[-1].drafts
        assert counts is not None
        full = events[-1].finish == "length" or (len(events) - 1) % 5 == 0
        assert counts.accepted == len(events) - 1 - counts.steps + (not full)
        assert counts.drafted == sum(
            len(mine) for step in engine.drafted for mine in step.values()
        )


def test_fresh_prompts_join_the_step_of_running_ones() -> None:
    engine = DraftEngine(right=0.5, sequences=2)
    run(engine, PROMPTS, max_tokens=9, draft=3, ignore_eos=True)
    mixed = [
        {seq: len(rows) for seq, rows in batch.rows_of_sequences().items()}
        for batch in engine.batches
        if 0 in batch.positions and batch.positions.max() > len(PROMPTS[2])
    ]
    assert mixed
    assert all(len(sizes) == 2 for sizes in mixed)


def test_what_is_rejected_is_taken_back_before_its_events() -> None:
    """Whenever the caller has the word, a sequence holds a beginning of the text."""
    engine = DraftEngine(right=0.5, sequences=1)
    tokens, seen = [3], []
    for event in generate(engine, [[3]], GenerateOptions(max_tokens=20, draft=3)):
        tokens.append(event.choice.token)
        seen.append(list(engine.held[0]))
    assert engine.removed
    assert all(held == tokens[: len(held)] for held in seen)
    assert max(map(len, seen)) > 10


def test_a_row_without_a_token_among_drafts_frees_everything() -> None:
    engine = DraftEngine(right=1.0, sequences=2)
    events = generate(engine, [[3], [4]], GenerateOptions(draft=3, ignore_eos=True))
    assert [next(events).prompt for _ in range(2)] == [0, 1]
    true_row = engine.row
    engine.row = lambda tokens: true_row(tokens) - np.inf  # type: ignore[method-assign]
    with pytest.raises(LogitsError):
        next(events)
    assert not any(engine.held.values())


# --- drawn texts -------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0.0, 0.5])
def test_the_law_of_whole_texts_is_that_without_drafts(right: float) -> None:
    """1,500 texts of three tokens against the product of the distributions of their rows."""
    sampling = SamplingOptions(temperature=1.3, top_k=3, repetition_penalty=1.2, seed=4)
    options = {"max_tokens": 3, "sampling": sampling, "ignore_eos": True, "draft": 2}
    engine = DraftEngine(right=right, sequences=50, vocab=4, scale=0.5)
    events = run(engine, [[1]] * 1_500, **options)
    chances = np.zeros((4, 4, 4))
    for text in product(range(4), repeat=3):
        history = [1, *text]
        rows = [reference(engine.row(history[:n]), sampling, history[:n]) for n in (1, 2, 3)]
        chances[text] = np.prod([row[token] for row, token in zip(rows, text, strict=True)])
    texts = [
        np.ravel_multi_index([e.choice.token for e in mine], (4, 4, 4)) for mine in events
    ]
    assert fits(texts, chances.ravel())
    other = np.roll(chances, 1, axis=2).ravel()
    assert not fits([t for t in texts if other[t] > 0], other)


def test_a_seed_fixes_a_drafted_text_whatever_its_neighbours() -> None:
    sampling = SamplingOptions(temperature=1.5, seed=9)
    options = {"max_tokens": 20, "sampling": sampling, "draft": 3}
    together = shown(run(DraftEngine(right=0.5), PROMPTS, **options))
    assert together == shown(run(DraftEngine(right=0.5, sequences=1), PROMPTS, **options))


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [-1, 1.5, "2"])
def test_odd_counts_are_refused(draft: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"draft is .*; it must be a whole number of 0 or more"
    ):
        GenerateOptions(draft=draft)


def test_drafts_beyond_the_rewind_budget_are_refused() -> None:
    engine = DraftEngine(right=1.0, rewind=5)
    with pytest.raises(ConfigError, match="draft is 6 and this bundle can take back 5 tokens"):
        generate(engine, [[1]], GenerateOptions(draft=6))


def test_drafts_of_an_engine_that_has_none_are_refused() -> None:
    engine = DraftEngine(right=1.0)
    engine.can_draft = False
    with pytest.raises(ConfigError, match="draft is 1 and this engine cannot draft; export"):
        generate(engine, [[1]], GenerateOptions(draft=1))
    assert run(engine, [[1]], max_tokens=3)
