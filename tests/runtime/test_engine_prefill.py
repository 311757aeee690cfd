"""Prefix reuse, coupled tokens, buffers reserved in advance, and the memory budget."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from support.engines import Engines

from cachegraph.models.errors import BatchError, CapacityError, UsageError
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2

TEXT = [int(token) for token in np.random.default_rng(3).integers(2, 100, 40)]


def cold_logits(engine: Engine, tokens: list[int], seq_id: int = 3) -> np.ndarray:
    engine.clear(seq_id)
    return engine.append(tokens, seq_id)


def test_a_longer_text_decodes_only_what_is_new(engine: Engine) -> None:
    first = engine.prefill(TEXT[:20])
    assert (first.reused, first.planned) == (0, 20)
    longer = engine.prefill(TEXT[:26])
    assert (longer.reused, longer.planned) == (20, 6)
    assert np.abs(longer.logits - cold_logits(engine, TEXT[:26])).max() <= 1e-5


@pytest.mark.parametrize("length", [12, 13, 16, 24])
def test_the_same_text_again_leaves_one_token_to_decode(engine: Engine, length: int) -> None:
    before = engine.prefill(TEXT[:length])
    again = engine.prefill(TEXT[:length])
    assert (again.reused, again.planned) == (length - 1, 1)
    assert np.abs(again.logits - before.logits).max() <= 1e-5
    assert engine.length(0) == length


def test_a_text_that_parts_within_reach_is_cut_there(engine: Engine) -> None:
    engine.prefill(TEXT[:30])
    other = [*TEXT[:25], 1, 1, 1]
    part = engine.prefill(other)
    assert (part.reused, part.planned) == (25, 3)
    assert np.abs(part.logits - cold_logits(engine, other)).max() <= 1e-5
    assert engine.tokens(0) == tuple(other)


def test_a_text_that_parts_out_of_reach_starts_where_the_sequence_can_stand(
    engine: Engine,
) -> None:
    """A40-token run shares 5 tokens with the next: no row behind them may be seen."""
    engine.prefill(TEXT)
    other = [*TEXT[:5], *[1] * 9]
    part = engine.prefill(other)
    assert part.reused == 0
    assert part.planned == len(other)
    assert np.abs(part.logits - cold_logits(engine, other)).max() <= 1e-5


def test_a_coupled_prefix_gives_every_sequence_its_rows(engine: Engine) -> None:
    owners = [(0, 2)] * 9 + [0, 2]
    batch = Batch.of([*TEXT[:9], 5, 6], [*range(9), 9, 9], owners)
    logits = engine.decode(batch)
    assert logits.shape[0] == 2
    for row, token, seq in ((0, 5, 0), (1, 6, 2)):
        assert engine.tokens(seq) == (*TEXT[:9], token)
        alone = cold_logits(engine, [*TEXT[:9], token])
        assert np.abs(logits[row] - alone).max() <= 1e-5


def test_a_coupled_token_of_different_histories_changes_nothing(engine: Engine) -> None:
    engine.append([7, 8], 0)
    engine.append([7, 9], 1)
    with pytest.raises(BatchError, match="token 0: coupled token"):
        engine.decode(Batch.of([5], [2], [(0, 1)]))
    assert engine.tokens(0) == (7, 8)
    assert engine.tokens(1) == (7, 9)


def test_reserved_buffers_serve_the_worst_step(engines: Engines) -> None:
    engine = engines.get("csa_only")
    reserved = engine.reserve(streams=2, step=4, context=40)
    assert reserved > 0
    calls = len(engine._graph.calls)
    assert engine.reserve(streams=2, step=4, context=40) == reserved
    assert len(engine._graph.calls) == calls
    with pytest.raises(CapacityError, match="streams"):
        engine.reserve(streams=99, step=1, context=4)


def test_a_budget_refuses_before_anything_is_allocated(engine: Engine) -> None:
    total = engine.memory.total
    with pytest.raises(CapacityError, match=f"need {total} bytes .*budget is {total - 1}"):
        Engine.load(engine.folder, memory_budget=total - 1)


def test_opening_says_what_the_caches_take(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        Engine.load(engine.folder, memory_budget=engine.memory.total).close()
    (line,) = caplog.messages
    held = (
        "raw 39",
        "csa 25",
        "lid 25",
        "csa_state 16",
        "lid_state 16",
        "hca 9",
        "hca_state 20",
    )
    for rows in held:
        assert f"{rows} rows f32" in line
    assert f"; {engine.memory.total / 2**20:.1f} MiB in all, 4 streams" in line


def test_positions_depend_on_history_so_moving_them_is_refused(engine: Engine) -> None:
    engine.append(TEXT[:6])
    for move in (engine.shift, engine.divide):
        with pytest.raises(UsageError, match="absolute position"):
            move(0, 0, -1, 2)
    assert engine.length(0) == 6


@pytest.mark.parametrize("tokens", [[], [*TEXT[:12], 10**6], [*TEXT, *[2] * 10**4]])
def test_a_refused_prefill_leaves_the_sequence_as_it_was(
    engine: Engine, tokens: list[int]
) -> None:
    engine.prefill(TEXT[:14])
    with pytest.raises((BatchError, CapacityError)):
        engine.prefill(tokens)
    assert engine.tokens(0) == tuple(TEXT[:14])
