"""Checkpoints with the engine: every mode gives what decoding only the accepted tokens gives."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import live_rows, open_engine
from support.engines import Engines, cold, feed, same_bits, snapshot

from cachegraph.models.capacity import Capacity
from cachegraph.models.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    RewindError,
    UsageError,
)
from cachegraph.runtime.checkpoint_book import Mode
from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2

CAPACITY = Capacity(context=100, sequences=24, max_step=24, rewind=5)
PHASES = range(24)  # sequence s stands at s tokens: every phase of windows of 4 and of 12
BUDGET = CAPACITY.rewind
TEXT, JUNK = 7, 40  # whose text goes on, and whose is rejected
MODES = list(Mode)
Answers = Mapping[int, tuple[Mapping[str, Any], Any]]


@pytest.fixture
def engine(engines: Engines) -> Engine:
    """The mixed model (ratios 4 and 12) with rings of 8 + 5 and 12 + 5 rows, nothing saved."""
    made = engines.get(capacity=CAPACITY)
    made.checkpoints.release()
    return made


@pytest.fixture(scope="module")
def wanted(engines: Engines) -> Answers:
    """By length of a text decoded cold: its rows, and the logits of the three tokens after it."""
    made = engines.get(capacity=CAPACITY)
    found = {}
    for length in range(PHASES.stop + BUDGET + 1):
        cold(made, 2, [length] if length else [], source=TEXT)
        held = live_rows(made, 2)
        found[length] = (held, feed(made, {2: 3}, texts={2: TEXT})[2])
    return found


@pytest.fixture(scope="module")
def phases(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state file in which sequence s holds the first s tokens."""
    made = engines.get(capacity=CAPACITY)
    give(made, {seq: seq for seq in PHASES})
    path = tmp_path_factory.mktemp("states") / "phases"
    made.save(path)
    return path


def give(engine: Engine, counts: Mapping[int, int], source: int = TEXT) -> None:
    """Decode the next tokens of some sequences, of those that get any."""
    real = {seq: count for seq, count in counts.items() if count}
    if real:
        feed(engine, real, texts=dict.fromkeys(real, source))


def accept(engine: Engine, seq: int, count: int) -> str:
    """Accept, and decode again what the mode asks for."""
    answer = engine.checkpoints.accept(seq, count)
    if answer.replay_from is not None:
        assert engine.length(seq) == answer.replay_from
        give(engine, {seq: count})
    return str(answer)


def check_rows(engine: Engine, seq: int, wanted: Answers) -> None:
    """Every row that a later step may read; the whole rings, where a mode restores them."""
    length = engine.length(seq)
    ours, (theirs, _) = live_rows(engine, seq), wanted[length]
    needed = {
        state: length - spec.oldest_needed(length)
        for spec in engine.manifest.planners.compressors
        for _, state in spec.serves
    }
    for spec in engine.manifest.contract.caches:
        rows, cold_rows = ours[spec.name], theirs[spec.name]
        if engine.checkpoints.mode is Mode.RING and spec.kind in needed:
            first = len(rows) - needed[spec.kind]
            rows, cold_rows = rows[first:], cold_rows[first:]
        assert rows.shape == cold_rows.shape
        assert np.abs(rows - cold_rows).max(initial=0) <= 1e-5, (length, spec.name)


def check_goes_on(engine: Engine, seqs: Iterable[int], wanted: Answers) -> None:
    """The logits of the next three tokens."""
    lengths = {seq: engine.length(seq) for seq in seqs}
    found = feed(engine, dict.fromkeys(lengths, 3), texts=dict.fromkeys(lengths, TEXT))
    for seq, rows in found.items():
        assert np.abs(rows - wanted[lengths[seq]][1]).max() <= 1e-5, lengths[seq]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", range(BUDGET + 1))
def test_every_mode_stands_where_serial_decoding_stands(
    engine: Engine, wanted: Answers, phases: Path, mode: Mode, count: int
) -> None:
    """At every phase of both windows: a rejected tail after `count` accepted tokens."""
    engine.restore(phases)
    engine.checkpoints.prepare(mode, BUDGET)
    engine.checkpoints.save()
    give(engine, dict.fromkeys(PHASES, count))
    give(engine, dict.fromkeys(PHASES, BUDGET - count), JUNK)
    answers = [engine.checkpoints.accept(seq, count) for seq in PHASES]
    again = {s: count for s, answer in enumerate(answers) if answer.replay_from is not None}
    assert all(engine.length(seq) == answers[seq].replay_from == seq for seq in again)
    give(engine, again)
    for seq in PHASES:
        assert engine.length(seq) == seq + count
        check_rows(engine, seq, wanted)
    check_goes_on(engine, PHASES, wanted)


@pytest.mark.parametrize("name", ["hca_only", "csa_only", "window_only"])
def test_models_that_lack_a_kind_rewind_too(engines: Engines, name: str) -> None:
    made = engines.get(name)
    for base in (7, 16):
        cold(made, 3, [base + 2], source=TEXT)
        wanted = feed(made, {3: 3}, texts={3: TEXT})[3]
        for mode in MODES:
            made.checkpoints.release()
            made.checkpoints.prepare(mode)
            made.clear()
            give(made, {1: base})
            made.checkpoints.save()
            give(made, {1: 2})
            give(made, {1: 3}, JUNK)
            accept(made, 1, 2)
            rows = feed(made, {1: 3}, texts={1: TEXT})[1]
            assert np.abs(rows - wanted).max() <= 1e-5, (mode, base)
    made.checkpoints.release()


@pytest.mark.parametrize("mode", MODES)
def test_accept_again_starts_from_the_save(
    engine: Engine, wanted: Answers, mode: Mode
) -> None:
    """Less and then more, and tokens after an accept count on from what it kept."""
    engine.checkpoints.prepare(mode, BUDGET)
    is_direct = mode in (Mode.RING, Mode.DELTA)
    for base in (0, 3, 11, 14):
        engine.clear()
        give(engine, {2: base})
        engine.checkpoints.save()
        give(engine, {2: BUDGET})
        for count in (1, 4, 0, BUDGET):
            answer = engine.checkpoints.accept(2, count)
            assert answer.is_direct is (is_direct or count == 0)
            stand = base + (count if is_direct else 0)
            assert engine.length(2) == len(engine.tokens(2)) == stand
            check_rows(engine, 2, wanted)
        accept(engine, 2, 1)
        for _ in range(3):
            give(engine, {2: 1}, JUNK)
        accept(engine, 2, 1)
        check_rows(engine, 2, wanted)
        give(engine, {2: 3})
        assert accept(engine, 2, 4) == "direct"
        accept(engine, 2, 3)
        check_rows(engine, 2, wanted)
        check_goes_on(engine, [2], wanted)


@pytest.mark.parametrize("mode", MODES)
def test_sequences_of_one_batch_keep_different_counts(
    engine: Engine, wanted: Answers, mode: Mode
) -> None:
    engine.checkpoints.prepare(mode, BUDGET)
    bases, kept = {0: 6, 1: 13, 2: 23}, {0: 0, 1: 2, 2: 4}
    give(engine, bases)
    engine.checkpoints.save()
    for step in range(4):  # unequal texts in one batch: who has been kept so far goes on
        give(engine, {seq: 1 for seq, count in kept.items() if step < count})
    give(engine, {0: 4, 1: 2}, JUNK)
    for seq, count in kept.items():
        accept(engine, seq, count)
    for seq, count in kept.items():
        assert engine.length(seq) == bases[seq] + count
        check_rows(engine, seq, wanted)
    check_goes_on(engine, kept, wanted)


def test_each_mode_says_what_comes_next(engine: Engine) -> None:
    answers = {}
    for mode in MODES:
        engine.clear()
        engine.checkpoints.prepare(mode)
        give(engine, {0: 9})
        engine.checkpoints.save()
        give(engine, {0: 3})
        answers[mode] = [str(engine.checkpoints.accept(0, n)) for n in (3, 1, 0)]
        engine.checkpoints.discard()
    direct = ["direct"] * 3
    replay = ["direct", "replay from 9", "direct"]
    assert answers == {
        Mode.RING: direct,
        Mode.DELTA: direct,
        Mode.SHADOW: replay,
        Mode.HOST: replay,
    }


def test_ring_rewinds_four_tokens_without_copying_a_byte(engine: Engine) -> None:
    give(engine, {0: 10, 1: 20})
    engine.checkpoints.save()
    give(engine, {0: 4})
    before = snapshot(engine)
    best = np.inf
    for count in (0, 4) * 50:  # forward again in between, which moves positions only as well
        start = time.perf_counter_ns()
        engine.checkpoints.accept(0, count)
        best = min(best, time.perf_counter_ns() - start) if count == 0 else best
    assert same_bits(before, snapshot(engine))
    assert engine.checkpoints.num_bytes == {}
    assert best < 50_000, f"{best} ns"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("edit", "word"), [("clear", "cleared"), ("remove", "cut"), ("copy", "copied over")]
)
def test_an_edited_sequence_has_a_void_checkpoint(
    engine: Engine, mode: Mode, edit: str, word: str
) -> None:
    engine.checkpoints.prepare(mode)
    give(engine, {0: 9, 1: 9})
    engine.checkpoints.save()
    give(engine, {0: 3, 1: 3})
    edits = {
        "clear": lambda: engine.clear(0),
        "remove": lambda: engine.remove(0, 11),
        "copy": lambda: engine.copy(1, 0),
    }
    edits[edit]()
    before, length = snapshot(engine), engine.length(0)
    with pytest.raises(
        RewindError, match=f"sequence 0 is void: the sequence was {word} since"
    ):
        engine.checkpoints.accept(0, 1)
    assert engine.length(0) == length
    assert same_bits(before, snapshot(engine))
    engine.checkpoints.accept(1, 1)
    assert engine.length(1) in (9, 10)


def test_a_restored_sequence_has_a_void_checkpoint(engine: Engine, tmp_path: Any) -> None:
    give(engine, {0: 9})
    engine.save(tmp_path / "state", [0])
    engine.checkpoints.save()
    engine.restore(tmp_path / "state")
    with pytest.raises(RewindError, match="void: the sequence was restored since"):
        engine.checkpoints.accept(0, 0)
    engine.checkpoints.save()
    assert engine.checkpoints.accept(0, 0).is_direct


def test_what_delta_cannot_record_voids_the_checkpoint(engine: Engine) -> None:
    engine.checkpoints.prepare("delta", 3)
    give(engine, {0: 9, 1: 9})
    engine.checkpoints.save()
    give(engine, {0: 2, 1: 2})
    give(engine, {0: 2})
    before = snapshot(engine)
    with pytest.raises(RewindError, match="4 tokens were decoded since the save, 3 were prep"):
        engine.checkpoints.accept(0, 1)
    assert engine.length(0) == 13
    assert same_bits(before, snapshot(engine))
    assert engine.checkpoints.accept(1, 1).is_direct


def test_a_recording_that_fails_voids_and_the_tokens_stay(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.checkpoints.prepare("delta", 3)
    engine.checkpoints.save()

    def fail(*args: object) -> None:
        raise DeviceError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(engine._graph._binder, "move_rows", fail)
        give(engine, {0: 2})
    assert engine.length(0) == 2
    with pytest.raises(RewindError, match="could not be recorded: no copy"):
        engine.checkpoints.accept(0, 1)


def test_a_copy_that_cannot_be_had_is_an_error_and_leaves_no_save(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.checkpoints.prepare("shadow")
    engine.checkpoints.save()

    def fail(*args: object) -> None:
        raise DeviceError("no device copy")

    with monkeypatch.context() as patch:
        patch.setattr(engine._graph._binder, "move_rows", fail)
        with pytest.raises(DeviceError, match="no device copy"):
            engine.checkpoints.save()
    assert engine.checkpoints.mode is Mode.SHADOW
    with pytest.raises(RewindError, match="no checkpoint is saved"):
        engine.checkpoints.accept(0, 0)


def test_ring_refuses_what_its_rings_lost_and_names_the_remedy(engine: Engine) -> None:
    give(engine, {0: 10})
    engine.checkpoints.save()
    give(engine, {0: 17})
    with pytest.raises(RewindError, match=r"cannot stand at 10: 17 positions .* --rewind"):
        engine.checkpoints.accept(0, 0)
    assert engine.checkpoints.accept(0, 13).is_direct
    with pytest.raises(RewindError, match="cannot stand at 10"):
        engine.checkpoints.accept(0, 0)
    assert engine.length(0) == 23


@pytest.mark.parametrize("mode", [Mode.SHADOW, Mode.HOST])
def test_a_copy_is_refused_once_the_raw_window_is_gone(
    engine: Engine, wanted: Answers, mode: Mode
) -> None:
    engine.checkpoints.prepare(mode)
    limit = engine.checkpoints.limit(mode)
    give(engine, {0: 10})
    engine.checkpoints.save()
    give(engine, {0: limit - 24}, JUNK)
    give(engine, {0: 24}, JUNK)
    accept(engine, 0, 0)
    check_goes_on(engine, [0], wanted)
    accept(engine, 0, 0)
    give(engine, {0: 24}, JUNK)
    give(engine, {0: limit - 23}, JUNK)
    with pytest.raises(RewindError, match="cannot stand at 10"):
        engine.checkpoints.accept(0, 0)
    assert engine.length(0) == 11 + limit


def test_prepare_names_limits_and_keeps_saves(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    points = engine.checkpoints
    for mode, count, limit in (("delta", 0, 8), ("delta", 9, 8), ("ring", 6, BUDGET)):
        with pytest.raises(ConfigError, match=f"takes 1 to {limit} tokens.*, not {count}"):
            points.prepare(mode, count)
    with pytest.raises(ConfigError, match="no checkpoint mode 'disk'; choose one of ring,"):
        points.prepare("disk")
    with caplog.at_level(logging.INFO):
        points.prepare("delta", 2)
    assert "checkpoint delta for 2 tokens: base 0.45 MiB, delta 0.06 MiB" in caplog.text
    give(engine, {0: 5})
    points.save()
    give(engine, {0: 2})
    with pytest.raises(
        UsageError, match="a delta save is live and cannot become a shadow one"
    ):
        points.prepare("shadow")
    points.prepare("delta", 1)
    assert points.max_tokens == 2
    points.prepare("delta", 7)
    assert points.max_tokens == 7
    give(engine, {0: 4})
    assert points.accept(0, 1).is_direct
    assert engine.length(0) == 6


def test_growing_keeps_recorded_rows(engine: Engine, wanted: Answers) -> None:
    engine.checkpoints.prepare("delta", 2)
    give(engine, {1: 5, 2: 14})
    engine.checkpoints.save()
    give(engine, {1: 2, 2: 2})
    engine.checkpoints.prepare("delta", 8)
    give(engine, {1: 5, 2: 6}, JUNK)
    for seq in (1, 2):
        accept(engine, seq, 2)
        check_rows(engine, seq, wanted)


def test_memory_is_what_was_allocated(engine: Engine) -> None:
    caches = engine.manifest.contract.caches
    states = [spec for spec in caches if spec.kind.value.endswith("state")]
    base = sum(spec.layout.live_rows * spec.width * 4 for spec in states)
    delta = sum(24 * 6 * spec.width * 4 for spec in states)
    sizes = {}
    for mode in MODES:
        engine.checkpoints.prepare(mode, 5 if mode is Mode.RING else 6)
        sizes[mode] = engine.checkpoints.num_bytes
        copies = engine.checkpoints._copies
        arrays = [*copies._host.values()]
        arrays += [
            buffer.array for buffer in (*copies._base.values(), *copies._delta.values())
        ]
        assert sum(array.nbytes for array in arrays) == sum(sizes[mode].values())
    assert sizes == {
        Mode.RING: {},
        Mode.DELTA: {"base": base, "delta": delta},
        Mode.SHADOW: {"shadow": base},
        Mode.HOST: {"host": base},
    }
    engine.checkpoints.release()
    assert engine.checkpoints.mode is Mode.RING


def test_discard_forgets_and_release_frees(engine: Engine) -> None:
    points = engine.checkpoints
    with pytest.raises(RewindError, match=r"no checkpoint is saved; call save\(\)"):
        points.accept(0, 0)
    points.prepare("host", 4)
    points.save()
    with pytest.raises(RewindError, match="1 tokens cannot be accepted; 0 to 0"):
        points.accept(0, 1)
    with pytest.raises(RewindError, match="holds no sequence 24"):
        points.accept(24, 0)
    points.discard()
    assert (points.mode, points.is_saved) == (Mode.HOST, False)
    points.release()
    assert points.num_bytes == {}


@pytest.mark.parametrize("mode", [Mode.DELTA, Mode.SHADOW])
def test_memory_that_cannot_be_had_changes_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    engine.checkpoints.prepare("delta", 2)
    engine.checkpoints.save()
    give(engine, {0: 1})
    if mode is Mode.SHADOW:
        engine.checkpoints.discard()

    def full(initial: Any, dtype: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(engine._graph._binder, "cache", full)
    with pytest.raises(
        CapacityError, match=f"no memory for a {mode} .* csa_state rows of layer 1"
    ):
        engine.checkpoints.prepare(mode, 6)
    assert (engine.checkpoints.mode, engine.checkpoints.max_tokens) == (Mode.DELTA, 2)
    if mode is Mode.DELTA:
        assert engine.checkpoints.accept(0, 0).is_direct


def test_closing_frees_the_copies(engines: Engines) -> None:
    bundle = engines.get(capacity=CAPACITY).folder
    with open_engine(bundle) as made:
        made.checkpoints.prepare("host")
    assert made.checkpoints.num_bytes == {}
    with pytest.raises(UsageError, match="closed"):
        made.checkpoints.save()


def test_save_copies_state_rings_and_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.checkpoints.prepare("shadow")
    moved: list[tuple[int, ...]] = []
    move = engine._graph._binder.move_rows

    def watch(source: Any, rows: Any, target: Any, places: Any) -> None:
        moved.append(source.array.shape)
        move(source, rows, target, places)

    monkeypatch.setattr(engine._graph._binder, "move_rows", watch)
    give(engine, {0: 30})
    engine.checkpoints.save()
    states = [
        c.shape for c in engine.manifest.contract.caches if c.kind.value.endswith("state")
    ]
    assert moved == states
