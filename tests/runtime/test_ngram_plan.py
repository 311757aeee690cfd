"""Hashed n-grams against plain integers, token by token."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from cachegraph.models.errors import ConfigError, PlanError
from cachegraph.models.ngram_spec import NgramSpec, ngram_spec
from cachegraph.runtime.planners.ngram import plan_ngram, validate_ngram

pytestmark = pytest.mark.r0

END = 5


def tiny(size: int = 3, module: int = 0) -> NgramSpec:
    return ngram_spec(
        size=size, heads=2, base=101, vocab=97, seed=1234, module=module, end=END
    )


def hashed(spec: NgramSpec, text: list[int], at: int) -> list[int]:
    """The rows of one token, each n-gram written out."""
    context = [text[at]]
    for back in range(1, len(spec.multipliers)):
        is_cut = at < back or END in text[at - back : at]
        context.append(END if is_cut else text[at - back])
    rows = []
    for head, (prime, offset) in enumerate(zip(spec.primes, spec.offsets, strict=True)):
        mixed = 0
        for token, factor in list(zip(context, spec.multipliers, strict=True))[
            : head // spec.heads_per_order + 2
        ]:
            mixed ^= token * factor
        rows.append(mixed % prime + offset)
    return rows


def test_the_constants_are_those_of_the_release() -> None:
    """As its checkpoint's buffers hold them."""
    spec = ngram_spec(
        size=3, heads=8, base=20_000_000, vocab=248320, seed=1234, module=0, end=248044
    )
    assert spec.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert (spec.primes[0], spec.primes[-1]) == (20000003, 20000171)
    assert spec.table_rows == 320001446


def test_a_second_module_goes_on_with_the_primes() -> None:
    assert tiny().primes == (101, 103, 107, 109)
    assert tiny(module=1).primes == (113, 127, 131, 137)
    assert tiny(module=1).multipliers != tiny().multipliers


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("seed", range(8))
def test_any_split_gives_the_ids_of_the_whole_text(size: int, seed: int) -> None:
    rng = random.Random(seed)
    spec = tiny(size)
    texts = {seq: [rng.choice([END, 7, 96, 13]) for _ in range(24)] for seq in (4, 1)}
    done = 0
    while done < 24:
        step = min(rng.choice([1, 2, 7]), 24 - done)
        tokens = np.array([t for text in texts.values() for t in text[done : done + step]])
        histories = {seq: text[:done] for seq, text in texts.items() if done}
        rows = plan_ngram(spec, tokens=tokens, streams=list(texts), histories=histories)
        validate_ngram(spec, rows, num_tokens=2 * step)
        wanted = [
            hashed(spec, text, at)
            for text in texts.values()
            for at in range(done, done + step)
        ]
        assert rows.tolist() == wanted
        done += step


def test_an_end_cuts_what_follows_it_not_itself() -> None:
    spec = tiny()

    def ids(*text: int) -> list[list[int]]:
        tokens = np.array(text)
        return plan_ngram(spec, tokens=tokens, streams=[0], histories={}).tolist()

    assert ids(9, 8, END, 7)[2] != ids(6, 6, END, 7)[2]
    assert ids(9, 8, END, 7)[3] == ids(6, 6, END, 7)[3] == ids(7)[0]


def test_a_plan_without_every_head_is_named() -> None:
    rows = np.zeros((2, 3), np.int64)
    with pytest.raises(PlanError, match="ngram plan: ids: has 6 entries, wanted 8"):
        validate_ngram(tiny(), rows, num_tokens=2)
    rows = np.full((2, 4), tiny().table_rows)
    with pytest.raises(PlanError, match=r"ngram plan: ids\[0\]: 420 is outside 0 to 419"):
        validate_ngram(tiny(), rows, num_tokens=2)


@pytest.mark.parametrize("field", ["multipliers", "primes", "offsets"])
def test_constants_that_do_not_fit_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="as many primes as offsets"):
        dataclasses.replace(tiny(), **{field: getattr(tiny(), field)[:1]})
