"""Padding and leftovers change nothing: poisoned buffers, spare rows, lanes; idle sequences."""

from __future__ import annotations

import numpy as np
import pytest
from support.bundles import Bundles, live_rows, open_engine
from support.engines import (
    Arrays,
    Call,
    Engines,
    cold,
    feed,
    poison_inputs,
    poison_results,
    poison_spare,
    same_bits,
    text,
    watched,
)

from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2

STEPS = ({0: 30, 3: 2}, {1: 11}, {0: 1, 1: 1, 3: 1}, {0: 2, 1: 5, 2: 24, 3: 9}, {2: 1}, {3: 3})
Logits = list[dict[int, np.ndarray]]


def run(engine: Engine) -> tuple[Logits, list[Arrays]]:
    """Logits of STEPS from nothing, and the rows that every sequence holds after them."""
    engine.clear()
    logits = [feed(engine, counts) for counts in STEPS]
    return logits, [live_rows(engine, seq) for seq in range(engine.num_sequences)]


def assert_same(got: tuple[Logits, list[Arrays]], wanted: tuple[Logits, list[Arrays]]) -> None:
    for mine, theirs in zip(got[0], wanted[0], strict=True):
        for seq, rows in theirs.items():
            assert np.array_equal(mine[seq], rows), seq
    for mine, theirs in zip(got[1], wanted[1], strict=True):
        assert same_bits(mine, theirs)


def test_what_the_last_step_left_in_plan_buffers_is_never_read(engine: Engine) -> None:
    wanted = run(engine)
    engine.clear()
    logits = []
    with watched(engine, after=lambda call: poison_inputs(engine)):
        for counts in STEPS:
            poison_results(engine)
            logits.append(feed(engine, counts))
    rows = [live_rows(engine, seq) for seq in range(engine.num_sequences)]
    assert_same((logits, rows), wanted)


@pytest.mark.parametrize("value", [1e6, np.nan])
def test_spare_rows_are_never_read(engine: Engine, value: float) -> None:
    """A61: whatever padded writes left there."""
    wanted = run(engine)
    poison_spare(engine, value)
    with watched(engine, after=lambda call: poison_spare(engine, value)):
        got = run(engine)
    assert_same(got, wanted)


@pytest.mark.parametrize("choices", [{}, {"select": "mask"}, {"dialect": "ort"}])
def test_what_padded_lanes_hold_changes_no_live_number(
    engines: Engines, choices: dict[str, str]
) -> None:
    """A47: token and position of every lane that no real token fills."""
    engine = engines.get(**choices)
    vocab = engine.manifest.vocab_size
    wanted = run(engine)
    poisoned = 0
    for token, position in ((0, 99), (vocab - 1, 3)):

        def poison(call: Call, token: int = token, position: int = position) -> None:
            nonlocal poisoned
            lanes = call.padded_lanes
            call.arrays["tokens"][lanes] = token
            call.arrays["positions"][lanes] = position
            poisoned += int(lanes.sum())

        with watched(engine, before=poison):
            assert_same(run(engine), wanted)
    assert poisoned > 20


@pytest.mark.parametrize("idle", [(0, 3), (3,), (0, 1)])
def test_idle_sequences_are_bit_stable_and_unaware(
    engine: Engine, idle: tuple[int, ...]
) -> None:
    """A51, A37: live lanes beside padded ones, 30 steps, then the idle ones go on."""
    alone = {seq: cold(engine, seq, [13 + seq, 1]) for seq in idle}
    engine.clear()
    feed(engine, {seq: 13 + seq for seq in idle})
    held = {seq: live_rows(engine, seq) for seq in idle}
    active = [seq for seq in range(4) if seq not in idle]
    with watched(engine) as calls:
        for _ in range(30):
            feed(engine, dict.fromkeys(active, 1))
    assert len(calls) == 30
    for seq in idle:
        assert same_bits(live_rows(engine, seq), held[seq])
    for seq, rows in feed(engine, dict.fromkeys(idle, 1)).items():
        assert np.abs(rows[-1] - alone[seq][-1]).max() <= 1e-5


def test_a_neighbour_absent_present_or_cleared_midway_changes_nothing(engine: Engine) -> None:
    """A37: request B beside request A in three ways, in steps of the same sizes."""
    answers = []
    for neighbour in ("absent", "present", "cleared"):
        engine.clear()
        rows = []
        for step in range(12):
            if neighbour != "absent":
                feed(engine, {0: 1 + step % 3})
            if neighbour == "cleared" and step == 6:
                engine.clear(0)
            rows.append(feed(engine, {2: 2})[2])
        answers.append(np.concatenate(rows))
    assert np.array_equal(answers[0], answers[1])
    assert np.array_equal(answers[0], answers[2])


def test_no_value_of_an_earlier_step_of_the_same_shape_is_used(bundles: Bundles) -> None:
    """A53: very different steps share a bucket; each equals the same step on a fresh engine."""
    bundle = bundles.bundle(bundles.checkpoint())
    steps = [(0, 40, 16), (2, 0, 13), (1, 7, 15), (0, 0, 16)]  # sequence, tokens held, tokens
    with open_engine(bundle) as engine:
        logits = []
        with watched(engine) as calls:
            for seq, held, count in steps:
                cold(engine, seq, [held] if held else [])
                calls.clear()
                logits.append(feed(engine, {seq: count})[seq])
                assert {call.dims["P"] for call in calls} == {16}
    for (seq, held, count), wanted in zip(steps, logits, strict=True):
        with open_engine(bundle) as fresh:
            if held:
                feed(fresh, {seq: held})
            assert np.array_equal(feed(fresh, {seq: count})[seq], wanted)


@pytest.mark.parametrize("bad", [-1, 131, 136])
def test_ids_outside_the_vocabulary_never_reach_the_graph(engine: Engine, bad: int) -> None:
    """A59: 131 is the size of the vocabulary."""
    assert engine.manifest.vocab_size == 131
    feed(engine, {1: 3})
    tokens = [*text(1, 3, 2, 131), bad]
    with watched(engine) as calls, pytest.raises(ValueError, match=f"token 2: id {bad} "):
        engine.append(tokens, 1)
    assert calls == []
    assert engine.length(1) == 3
