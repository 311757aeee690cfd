"""The acceptance rule: the law of what comes out, exactly and by draws, and rules that break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest
from support.chances import fits, reference

from cachegraph.runtime.distribution import Distribution
from cachegraph.runtime.sampling import Sampler, SamplingOptions
from cachegraph.runtime.speculative import Draft, residual, settle

pytestmark = pytest.mark.r0

Rule = Callable[[Draft, Distribution, Callable[[], float]], int]
TWELFTHS = 12
GRID = [(2 * step + 1) / 120 for step in range(60)]
# p and q in twelfths: every threshold of the rule then lies between two points of the grid.
PAIRS = [
    ([3, 4, 2, 3], [3, 4, 2, 3]),  # the same
    ([6, 6, 0, 0], [0, 0, 8, 4]),  # disjoint
    ([6, 3, 2, 1], [1, 2, 3, 6]),
    ([0, 5, 4, 3], [6, 2, 2, 2]),  # partly outside p
    ([2, 6, 1, 3], [0, 12, 0, 0]),  # a greedy draft
    ([0, 0, 12, 0], [3, 3, 3, 3]),  # a greedy choice
    ([0, 0, 12, 0], [0, 12, 0, 0]),  # both, unequal
    ([0, 12, 0, 0], [0, 12, 0, 0]),  # both, equal
    ([4, 0, 4, 4], [6, 6, 0, 0]),
]


def distribution(twelfths: Sequence[int]) -> Distribution:
    """Tokens without a share are left out, as filters leave them out."""
    ids = np.flatnonzero(twelfths)
    return Distribution(ids=ids, weights=np.array(twelfths, np.float64)[ids] / 3)


class Grid:
    """Every way in which chance may fall: the first number asked for, and the second."""

    def __init__(self, first: float, second: float) -> None:
        self._numbers: Iterator[float] = iter((first, second))
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return next(self._numbers)


def law(rule: Rule, p: Sequence[int], q: Sequence[int]) -> list[Fraction]:
    """Probability of each outcome over the draft and all random numbers, exactly."""
    outcomes = [Fraction(0)] * len(p)
    for token, weight in enumerate(q):
        draft = Draft(token=token, law=distribution(q))
        for first in GRID if weight else ():
            share = Fraction(weight, TWELFTHS * len(GRID))
            for second in GRID:
                chance = Grid(first, second)
                outcome = rule(draft, distribution(p), chance)
                if chance.asked < 2:
                    outcomes[outcome] += share
                    break
                outcomes[outcome] += share / len(GRID)
    return outcomes


def always(draft: Draft, target: Distribution, uniform: Callable[[], float]) -> int:
    return draft.token


def redraw(draft: Draft, target: Distribution, uniform: Callable[[], float]) -> int:
    """A rejected draft is replaced from p instead of from what q left of it."""
    kept = settle(draft, target, uniform)
    return kept if kept == draft.token else target.draw(uniform())


@pytest.mark.parametrize(("p", "q"), PAIRS, ids=str)
def test_the_outcome_has_exactly_the_law_of_p(p: list[int], q: list[int]) -> None:
    assert law(settle, p, q) == [Fraction(weight, TWELFTHS) for weight in p]


def test_a_rule_that_always_accepts_has_the_law_of_q() -> None:
    for p, q in PAIRS:
        outcomes = law(always, p, q)
        assert outcomes == [Fraction(weight, TWELFTHS) for weight in q]
        assert (outcomes == [Fraction(weight, TWELFTHS) for weight in p]) == (p == q)


@pytest.mark.parametrize(("p", "q"), PAIRS, ids=str)
def test_a_draft_stands_with_the_overlap_of_p_and_q(p: list[int], q: list[int]) -> None:
    """Leviathan et al. 2023, theorem 3.5: the share accepted is the sum of min(p, q)."""
    kept = Fraction(0)
    for token, weight in enumerate(q):
        draft = Draft(token=token, law=distribution(q))
        for first in GRID if weight else ():
            stands = settle(draft, distribution(p), Grid(first, 0.5)) == token
            kept += stands * Fraction(weight, TWELFTHS * len(GRID))
    assert kept == Fraction(sum(map(min, p, q)), TWELFTHS)


def test_a_greedy_draft_stands_only_if_it_is_the_choice() -> None:
    for token in range(4):
        draft = Draft(token=token, law=distribution([12 * (i == token) for i in range(4)]))
        for chance in (0.0, 0.5, 1 - 2**-53):
            assert settle(draft, distribution([0, 0, 12, 0]), lambda c=chance: c) == 2  # type: ignore[misc]


def test_no_chance_is_asked_for_a_draft_that_p_likes_as_much() -> None:
    chance = Grid(0.5, 0.5)
    draft = Draft(token=0, law=distribution([3, 9, 0, 0]))
    assert settle(draft, distribution([4, 4, 4, 0]), chance) == 0
    assert chance.asked == 0


def test_a_replaced_token_is_never_the_draft() -> None:
    """The caller tells a draft that stands by the token alone."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        p, q = (Distribution(ids=np.arange(5), weights=rng.random(5)) for _ in range(2))
        shares = residual(p, q).weights
        for token in range(5):
            rejected = p.probabilities(np.array(token)) < q.probabilities(np.array(token))
            assert (shares[token] == 0) or not rejected


def test_rounding_that_leaves_no_residual_leaves_p() -> None:
    p = distribution([3, 4, 2, 3])
    assert residual(p, p) is p
    assert residual(p, distribution([3, 9, 0, 0])).ids.tolist() == [0, 1, 2, 3]


# --- through a sampler, from logits ------------------------------------------------------------

TARGET = np.array([0.5, 2.0, -1.0, 2.0, 1.0, -2.0, 0.0], dtype=np.float32)
DRAFTS = {
    "another": np.array([1.5, 0.0, 1.0, 2.5, -1.0, 0.5, 0.0], dtype=np.float32),
    "the same": TARGET,
    "certain": np.array([0, 0, 90, 0, 0, 0, 0], dtype=np.float32),
    "disjoint": np.array([0, -90, 0, -90, -90, 0, 0], dtype=np.float32),
}
OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.25, "repetition_penalty": 1.4},
]
HISTORY = [1, 5]


def outcomes(options: SamplingOptions, row: np.ndarray, rule: Rule | None = None) -> list[int]:
    """2,000 drafted positions; another rule takes the place of the sampler's."""
    sampler = Sampler(options, TARGET.size)
    tokens = []
    for _ in range(2_000):
        draft = sampler.draft(row, HISTORY)
        if rule is None:
            tokens.append(sampler.sample(TARGET, HISTORY, draft).token)
        else:
            target = sampler.distribution(TARGET, HISTORY)
            tokens.append(rule(draft, target, np.random.default_rng(len(tokens)).random))
    return tokens


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("fields", OPTIONS, ids=str)
def test_drafting_leaves_the_distribution_as_it_is(
    fields: dict[str, float], name: str
) -> None:
    options = SamplingOptions(**fields, seed=21)  # type: ignore[arg-type]
    assert fits(outcomes(options, DRAFTS[name]), reference(TARGET, options, HISTORY))


@pytest.mark.parametrize("rule", [always, redraw])
@pytest.mark.parametrize("fields", OPTIONS, ids=str)
def test_the_statistics_catch_a_broken_rule(fields: dict[str, float], rule: Rule) -> None:
    options = SamplingOptions(**fields, seed=21)  # type: ignore[arg-type]
    tokens = outcomes(options, DRAFTS["another"], rule)
    assert not fits(tokens, reference(TARGET, options, HISTORY))


def test_a_drafted_choice_has_the_log_probability_of_the_target_row() -> None:
    options = SamplingOptions(temperature=1.0, seed=1, logprobs=2)
    sampler = Sampler(options, TARGET.size)
    choice = sampler.sample(TARGET, draft=sampler.draft(DRAFTS["another"]))
    logprobs = TARGET - np.log(np.exp(TARGET.astype(np.float64)).sum())
    assert choice.logprob == pytest.approx(logprobs[choice.token])
    assert [token for token, _ in choice.top] == [1, 3]
