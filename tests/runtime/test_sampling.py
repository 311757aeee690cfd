"""Sampling: options, filters, ties, statistics, seeds, log-probabilities and refusals."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chances import fits, reference

from cachegraph.models.errors import BatchError, ConfigError, ContractError, LogitsError
from cachegraph.runtime.sampling import Choice, Sampler, SamplingOptions, TokenLogprob

pytestmark = pytest.mark.r0

ROW = np.array([0.5, 2.0, -1.0, 2.0, 1.0, -3.0, 0.0], dtype=np.float32)


def draws(options: SamplingOptions, row: np.ndarray, count: int, stream: int = 0) -> list[int]:
    sampler = Sampler(options, row.size, stream=stream)
    return [sampler.sample(row).token for _ in range(count)]


# --- options ---------------------------------------------------------------------------------


def test_defaults_are_greedy() -> None:
    """Without options the best token is taken."""
    assert SamplingOptions().is_greedy
    assert draws(SamplingOptions(), ROW, 3) == [1, 1, 1]


def test_every_fault_is_listed() -> None:
    """One error names all options that are out of range, with value and wish."""
    with pytest.raises(ConfigError) as caught:
        SamplingOptions(
            temperature=-0.1,
            top_k=-1,
            top_p=0.0,
            min_p=1.5,
            repetition_penalty=0.0,
            seed=-3,
            logprobs=-1,
        )
    message = str(caught.value)
    for fact in ("temperature is -0.1", "top_k is -1", "top_p is 0.0", "min_p is 1.5"):
        assert fact in message
    for fact in ("repetition_penalty is 0.0", "seed is -3", "logprobs is -1"):
        assert fact in message


@pytest.mark.parametrize(
    "fault",
    [
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "0.7"},
        {"temperature": None},
        {"top_k": 2.5},
        {"top_p": 1.0001},
        {"min_p": math.nan},
        {"repetition_penalty": math.inf},
        {"seed": 1.5},
    ],
    ids=str,
)
def test_odd_values_are_refused(fault: dict[str, object]) -> None:
    """NaN, infinity, wrong types and a meaningless None are faults."""
    with pytest.raises(ConfigError, match=next(iter(fault))):
        SamplingOptions(**fault)  # type: ignore[arg-type]


def test_bounds_are_inclusive_where_said() -> None:
    """The extreme legal values are accepted, numpy scalars too."""
    SamplingOptions(temperature=0, top_k=0, top_p=1, min_p=1, repetition_penalty=1e-9, seed=0)
    SamplingOptions(temperature=np.float32(0.5), top_k=np.int64(3))  # type: ignore[arg-type]


# --- refusals (case A59) ---------------------------------------------------------------------

MODES = [
    SamplingOptions(),
    SamplingOptions(repetition_penalty=1.3),
    SamplingOptions(logprobs=2),
    SamplingOptions(temperature=1.0, seed=1),
    SamplingOptions(temperature=0.7, top_k=2, top_p=0.5, min_p=0.1, seed=1),
]


@pytest.mark.parametrize("options", MODES)
def test_a_row_of_minus_infinity_is_an_error(options: SamplingOptions) -> None:
    """A fully masked row never becomes an id."""
    row = np.full(7, -np.inf, dtype=np.float32)
    with pytest.raises(LogitsError, match="all -inf"):
        Sampler(options, 7).sample(row, [1])


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_nan_and_plus_infinity_are_errors(
    options: SamplingOptions, bad: float, place: int
) -> None:
    """One bad value anywhere in the row is refused and named."""
    row = ROW.copy()
    row[place] = bad
    with pytest.raises(LogitsError, match=f"hold {bad} at id {place}"):
        Sampler(options, 7).sample(row, [1])


@pytest.mark.parametrize("options", MODES)
def test_a_single_live_token_is_chosen(options: SamplingOptions) -> None:
    """All but one token masked: that one is chosen whatever the filters."""
    row = np.full(7, -np.inf, dtype=np.float32)
    row[5] = -40.0
    choice = Sampler(options, 7).sample(row, [5])
    assert choice.token == 5
    assert len(choice.top) <= 1


@pytest.mark.parametrize("shape", [(6,), (8,), (1, 7)])
def test_a_row_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """A row must be [V]."""
    with pytest.raises(ContractError, match=r"wants a row \(7,\)"):
        Sampler(SamplingOptions(), 7).sample(np.zeros(shape, dtype=np.float32))


@pytest.mark.parametrize("token", [-1, 7, 12])
def test_history_outside_the_vocabulary_is_refused(token: int) -> None:
    """A negative id would silently penalise a token counted from the end."""
    sampler = Sampler(SamplingOptions(repetition_penalty=2.0), 7)
    with pytest.raises(BatchError, match=f"token id {token}"):
        sampler.sample(ROW, [0, token])


# --- greedy, penalty, filters ----------------------------------------------------------------


def test_greedy_takes_the_lower_id_on_ties() -> None:
    """Two equal best logits: the lower id."""
    assert Sampler(SamplingOptions(), 7).sample(ROW) == Choice(token=1)


def test_the_row_is_left_alone() -> None:
    """Sampling with everything on does not write into the caller's logits."""
    row = ROW.copy()
    options = SamplingOptions(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.5, logprobs=3
    )
    Sampler(options, 7).sample(row, [1, 1, 2])
    np.testing.assert_array_equal(row, ROW)


def test_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    """A seen token loses whatever its sign, and only once however often it was seen."""
    penalty = SamplingOptions(repetition_penalty=1.5)
    row = np.array([3.0, 2.5, 1.9], dtype=np.float32)
    assert Sampler(penalty, 3).sample(row, [0]).token == 1
    assert Sampler(penalty, 3).sample(row, [0, 0, 0, 1, 1]).token == 0
    negative = np.array([-1.0, -1.4, -9.0], dtype=np.float32)
    assert Sampler(penalty, 3).sample(negative, [0]).token == 1


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0])
def test_extreme_numbers_still_choose(penalty: float, temperature: float) -> None:
    """Saturation instead of overflow: a token comes out, with no warning."""
    row = np.array([3e38, -3e38, -np.inf, 1.0], dtype=np.float32)
    options = SamplingOptions(temperature=temperature, repetition_penalty=penalty, seed=0)
    assert Sampler(options, 4).sample(row, [0, 1, 2, 3]).token in (0, 1, 3)


def test_top_k_ties_go_to_the_lower_id() -> None:
    """Five equal logits, top 3: only the first three ids are ever drawn."""
    row = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0], dtype=np.float32)
    options = SamplingOptions(temperature=1.0, top_k=3, seed=5)
    assert set(draws(options, row, 200)) == {0, 1, 3}


def test_top_p_includes_the_token_that_reaches_it() -> None:
    """With shares 0.5, 0.3, 0.2: 0.5 keeps one token, just above it two."""
    row = np.log(np.array([0.3, 0.5, 0.2], dtype=np.float32))
    at = SamplingOptions(temperature=1.0, top_p=0.499, seed=1)
    above = SamplingOptions(temperature=1.0, top_p=0.51, seed=1)
    assert set(draws(at, row, 200)) == {1}
    assert set(draws(above, row, 200)) == {0, 1}


def test_top_p_looks_past_its_first_candidates() -> None:
    """A flat distribution of 1,000 tokens: half the mass is the 500 lowest ids."""
    row = np.zeros(1000, dtype=np.float32)
    options = SamplingOptions(temperature=1.0, top_p=0.5, seed=2)
    seen = set(draws(options, row, 2000))
    assert max(seen) == 499
    assert len(seen) > 480


def test_min_p_is_relative_to_the_best_token() -> None:
    """min_p 0.5 keeps tokens at least half as likely as the best."""
    row = np.log(np.array([0.4, 0.25, 0.19, 0.16], dtype=np.float32))
    options = SamplingOptions(temperature=1.0, min_p=0.5, seed=3)
    assert set(draws(options, row, 300)) == {0, 1}


def test_the_order_of_filters_is_the_documented_one() -> None:
    """Top-p is measured after temperature and min-p, on what they leave.

    Shares at temperature 1 are 0.5, 0.3, 0.2. min_p 0.5 leaves 0.625 and 0.375, so top_p 0.6
    keeps one token; measured on the raw shares it would keep two.
    """
    row = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    options = SamplingOptions(temperature=1.0, min_p=0.5, top_p=0.6, seed=3)
    assert set(draws(options, row, 100)) == {0}
    hot = SamplingOptions(temperature=50.0, top_p=0.6, seed=3)
    assert set(draws(hot, row, 100)) == {0, 1}


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.floats(0.05, 4.0),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(0.5, 2.0),
    seed=st.integers(0, 2**40),
)
ROWS = st.lists(
    st.sampled_from([-5.0, -1.0, 0.0, 0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=9
)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(values=ROWS, options=OPTIONS, seen=st.lists(st.integers(0, 8), max_size=6))
def test_a_draw_is_always_one_the_reference_allows(
    values: list[float], options: SamplingOptions, seen: list[int]
) -> None:
    """Any filters keep at least one token, and never one that plain loops would drop."""
    row = np.array(values, dtype=np.float32)
    history = [token for token in seen if token < row.size]
    choice = Sampler(options, row.size).sample(row, history)
    close = SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=min(1.0, options.top_p + 1e-9),
        min_p=max(0.0, options.min_p - 1e-9),
        repetition_penalty=options.repetition_penalty,
    )
    assert reference(row, close, history)[choice.token] > 0


# --- statistics ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0, seed=11),
        SamplingOptions(temperature=2.5, seed=12),
        SamplingOptions(temperature=1.5, top_k=5, seed=13),
        SamplingOptions(temperature=1.0, top_p=0.7, seed=14),
        SamplingOptions(temperature=3.0, min_p=0.3, repetition_penalty=1.4, seed=15),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(options: SamplingOptions) -> None:
    """Chi-square of 6,000 draws against plain loops stays under the 99.9 % quantile."""
    history, count = [1, 5], 6_000
    sampler = Sampler(options, ROW.size)
    tokens = [sampler.sample(ROW, history).token for _ in range(count)]
    assert fits(tokens, reference(ROW, options, history))


# --- seeds -----------------------------------------------------------------------------------

WARM = SamplingOptions(temperature=1.0, seed=42)
WIDE = np.zeros(1000, dtype=np.float32)


def test_one_seed_gives_one_text() -> None:
    """Equal seed and stream repeat; another seed or stream does not."""
    first = draws(WARM, WIDE, 40)
    assert draws(WARM, WIDE, 40) == first
    assert draws(SamplingOptions(temperature=1.0, seed=43), WIDE, 40) != first
    assert draws(WARM, WIDE, 40, stream=1) != first
    assert draws(SamplingOptions(temperature=1.0), WIDE, 40) != draws(
        SamplingOptions(temperature=1.0), WIDE, 40
    )


def test_the_random_stream_is_pinned() -> None:
    """The ids of a seed are part of what users rely on: a change of generator must be seen."""
    assert draws(WARM, WIDE, 5) == [916, 910, 876, 309, 954]


def test_streams_are_the_spawned_children_of_the_seed() -> None:
    """Stream i draws what SeedSequence(seed).spawn(n)[i] draws, for any n."""
    for stream, child in enumerate(np.random.SeedSequence(42).spawn(3)):
        rng = np.random.Generator(np.random.PCG64(child))
        wanted = [int(rng.random() * 1000) for _ in range(20)]
        assert draws(WARM, WIDE, 20, stream=stream) == wanted


def test_neighbours_do_not_change_a_sequence() -> None:
    """Interleaving with samplers that stop early or late leaves the draws as they were."""
    alone = draws(WARM, WIDE, 30, stream=2)
    samplers = [Sampler(WARM, WIDE.size, stream=i) for i in range(4)]
    mixed = []
    for step in range(30):
        for i, sampler in enumerate(samplers):
            if i == 2 or step < 5 * i:
                token = sampler.sample(WIDE).token
                if i == 2:
                    mixed.append(token)
    assert mixed == alone


def test_filters_that_remove_nothing_change_nothing() -> None:
    """top_k = V and a tiny min_p give the very draws of no filter at all."""
    neutral = SamplingOptions(temperature=1.0, seed=42, top_k=1000, min_p=1e-6, top_p=1.0)
    near = SamplingOptions(temperature=1.0, seed=42, top_p=math.nextafter(1.0, 0.0))
    fewer = SamplingOptions(temperature=1.0, seed=42, top_k=999)
    row = np.linspace(-2, 2, 1000, dtype=np.float32)
    row[0] = -200.0
    wanted = draws(WARM, row, 50)
    for options in (neutral, near, fewer):
        assert draws(options, row, 50) == wanted


def test_a_draw_of_zero_skips_weightless_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest random number never lands on a token whose probability underflowed to 0."""
    sampler = Sampler(WARM, 3)
    monkeypatch.setattr(sampler, "_rng", SimpleNamespace(random=lambda: 0.0))
    assert sampler.sample(np.array([-5000.0, 1.0, 1.0], dtype=np.float32)).token == 1


def test_log_probabilities_do_not_change_the_draw() -> None:
    """Asking for log-probabilities takes no random number."""
    asked = SamplingOptions(temperature=1.0, seed=42, logprobs=5)
    assert draws(asked, WIDE, 30) == draws(WARM, WIDE, 30)


# --- log-probabilities -----------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Penalty, temperature and filters do not move them; ties go to the lower id."""
    exact = ROW.astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    options = SamplingOptions(
        temperature=0.3, top_k=1, repetition_penalty=1.2, seed=0, logprobs=3
    )
    choice = Sampler(options, 7).sample(ROW, [1])
    assert choice.token == 3
    assert choice.logprob == pytest.approx(exact[3], abs=1e-12)
    assert [entry.token for entry in choice.top] == [1, 3, 4]
    assert [entry.logprob for entry in choice.top] == pytest.approx(
        exact[[1, 3, 4]], abs=1e-12
    )


def test_equal_logprobs_are_listed_by_id() -> None:
    """Hundreds of ties come in the order of their ids, behind what is better."""
    row = np.tile(np.array([0.0, 1.0], dtype=np.float32), 300)
    choice = Sampler(SamplingOptions(logprobs=500), 600).sample(row)
    assert [entry.token for entry in choice.top] == [*range(1, 600, 2), *range(0, 400, 2)]


def test_logprobs_zero_gives_the_chosen_one_only() -> None:
    """0 asks for the chosen token's log-probability without a list."""
    choice = Sampler(SamplingOptions(logprobs=0), 7).sample(ROW)
    assert choice.top == ()
    assert choice.logprob is not None


def test_logprobs_survive_huge_logits_and_masks() -> None:
    """No overflow at 3e38, and masked tokens are left out of the list."""
    row = np.array([3e38, 3e38, -np.inf], dtype=np.float32)
    choice = Sampler(SamplingOptions(logprobs=9), 3).sample(row)
    half = pytest.approx(math.log(0.5))
    assert choice == Choice(
        token=0, logprob=half, top=(TokenLogprob(0, half), TokenLogprob(1, half))
    )
