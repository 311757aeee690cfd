"""Edits of sequences on a running engine: what follows equals a cold run of the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.bundles import Bundles, with_capacity
from support.engines import Engines, changed_rows, same_bits, snapshot, text
from support.sessions import Oracle, append, needed_rows, poison_unneeded

from cachegraph.models.contract import CacheKind
from cachegraph.models.errors import RewindError, UsageError
from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2

REWIND = 8  # of support.bundles.CAPACITY
Edit = Callable[[Engine], object]


@pytest.fixture(scope="module")
def oracles(bundles: Bundles) -> Iterator[Callable[[Engine], Oracle]]:
    """One oracle for each bundle, closed at the end."""
    made: dict[object, Oracle] = {}

    def of(engine: Engine) -> Oracle:
        if engine.folder not in made:
            made[engine.folder] = Oracle(engine.folder)
        return made[engine.folder]

    yield of
    for oracle in made.values():
        oracle.engine.close()


@pytest.fixture
def oracle(engine: Engine, oracles: Callable[[Engine], Oracle]) -> Oracle:
    """Cold runs of the mixed model."""
    return oracles(engine)


def words(engine: Engine, seq: int, first: int, end: int) -> list[int]:
    """Tokens of one text of a sequence."""
    return text(seq, first, end - first, engine.manifest.vocab_size)


def reject(engine: Engine, oracle: Oracle, length: int, drafts: int, taken: int) -> None:
    """Take `taken` of `drafts` tokens back; the state and 5 more tokens equal a cold run."""
    engine.clear(1)
    append(engine, 1, words(engine, 1, 0, length))
    accepted = words(engine, 1, length, length + drafts - taken)
    append(engine, 1, accepted + words(engine, 9, 0, taken))
    before = snapshot(engine)
    engine.remove(1, length + drafts - taken)
    assert same_bits(before, snapshot(engine)), "a rejection copied rows"
    held = length + drafts - taken
    assert engine.tokens(1) == tuple(words(engine, 1, 0, held))
    oracle.check(engine, 1, words(engine, 1, held, held + 5))


@pytest.mark.parametrize("phase", range(12))
def test_every_rejection_at_every_phase_of_both_windows(
    engine: Engine, oracle: Oracle, phase: int
) -> None:
    """A21, A25: blocks of 4 and 12, a window of 7, up to 8 rejected of 8."""
    for taken in range(REWIND + 1):
        reject(engine, oracle, 12 + phase, REWIND, taken)


@pytest.mark.parametrize("name", ["hca_only", "csa_only", "window_only", "ratios"])
def test_rejections_in_every_kind_of_model(
    engines: Engines, oracles: Callable[[Engine], Oracle], name: str
) -> None:
    engine = engines.get(name)
    for length in (1, 5, 19, 20, 41, 59, 60):
        for taken in (1, 4, REWIND):
            reject(engine, oracles(engine), length, REWIND, taken)


@pytest.mark.parametrize("rewind", [0, 1, 3])
def test_rejections_up_to_a_smaller_budget(
    engines: Engines, oracles: Callable[[Engine], Oracle], rewind: int
) -> None:
    engine = engines.get(capacity=with_capacity(rewind=rewind, max_step=5))
    for length in (3, 11, 12, 23, 26):
        for taken in range(rewind + 1):
            reject(engine, oracles(engine), length, rewind or 2, taken)


def test_a_rejection_after_a_rejection(engine: Engine, oracle: Oracle) -> None:
    """Rows that were rejected twice, at a block edge."""
    append(engine, 0, words(engine, 0, 0, 30))
    for junk, position in ((6, 30), (5, 27), (2, 26), (7, 25)):
        if engine.length(0) < position:
            append(engine, 0, words(engine, 0, engine.length(0), position))
        append(engine, 0, words(engine, 7, 0, junk))
        engine.remove(0, position)
    oracle.check(engine, 0, words(engine, 0, 25, 40))


def test_a_rejection_leaves_the_neighbours_alone(engine: Engine, oracle: Oracle) -> None:
    for seq, count in enumerate((21, 30, 9, 47)):
        append(engine, seq, words(engine, seq, 0, count))
    held = {seq: needed_rows(engine, seq) for seq in (0, 2, 3)}
    engine.remove(1, 24)
    for seq, rows in held.items():
        assert same_bits(rows, needed_rows(engine, seq))
    for seq in range(4):
        start = engine.length(seq)
        oracle.check(engine, seq, words(engine, seq, start, start + 3))


@pytest.mark.parametrize("position", [25, 28, 30, 32, 36])
def test_rows_that_are_not_needed_are_never_read(
    engine: Engine, oracle: Oracle, position: int
) -> None:
    """A13: rejected, copied-over and forgotten rows hold 1e6; nothing of it is seen."""
    append(engine, 0, words(engine, 0, 0, position))
    append(engine, 0, words(engine, 8, 0, 5))
    append(engine, 1, words(engine, 1, 0, 70))
    append(engine, 2, words(engine, 2, 0, 44))
    engine.remove(0, position)
    engine.copy(0, 1)
    engine.clear(2)
    poison_unneeded(engine, 1e6)
    for seq in (1, 0, 2):
        start = engine.length(seq)
        for end in (start + 1, start + 2, start + 15):
            oracle.check(engine, seq, words(engine, seq, engine.length(seq), end))


def refused(engine: Engine, edit: Edit, fault: type[Exception], pattern: str) -> None:
    """An edit raises, and rows, lengths, tokens and reach are as they were."""
    rows = snapshot(engine)
    seen = [(engine.tokens(seq), engine.reachable(seq)) for seq in range(4)]
    with pytest.raises(fault, match=pattern):
        edit(engine)
    assert same_bits(rows, snapshot(engine))
    assert [(engine.tokens(seq), engine.reachable(seq)) for seq in range(4)] == seen


def test_a_cut_out_of_reach_names_what_is_reachable(engine: Engine, oracle: Oracle) -> None:
    """B34. Behind a long step the rings hold 2*4 + 8 and 12 + 8 rows."""
    append(engine, 0, words(engine, 0, 0, 50))
    append(engine, 2, words(engine, 2, 0, 5))
    assert engine.reachable(0) == (range(1), range(40, 51))
    pattern = r"holds 50 tokens and cannot be cut to 35; it can stand at 0, 40 to 50; "
    refused(engine, lambda e: e.remove(0, 35), RewindError, pattern)
    refused(engine, lambda e: e.remove(0, 39), RewindError, "cannot be cut to 39")
    refused(engine, lambda e: e.remove(-1, 1), RewindError, "sequence 0")
    oracle.check(engine, 0, words(engine, 0, 50, 53))
    for position in (53, 52, 44):
        engine.remove(0, position)
        oracle.check(engine, 0)
    engine.remove(0, 0)
    oracle.check(engine, 0, words(engine, 0, 0, 9))


RANGES = {
    "to the end": ((0, 17, -1), 17),
    "end named": ((0, 17, 20), 17),
    "end beyond": ((0, 17, 99), 17),
    "from the start": ((0, -1, -1), 0),
    "start far below": ((0, -99, 20), 0),
    "empty": ((0, 18, 18), 20),
    "empty, backwards": ((0, 19, 4), 20),
    "behind the end": ((0, 20, -1), 20),
    "far behind the end": ((0, 70, 80), 20),
    "empty in the middle": ((0, 3, 3), 20),
}


@pytest.mark.parametrize("case", RANGES)
def test_ranges(engine: Engine, oracle: Oracle, case: str) -> None:
    args, left = RANGES[case]
    append(engine, 0, words(engine, 0, 0, 20))
    append(engine, 1, words(engine, 1, 0, 6))
    engine.remove(*args)
    assert [engine.length(0), engine.length(1)] == [left, 6]
    oracle.check(engine, 0, words(engine, 0, left, left + 5))


def test_id_minus_one_means_every_sequence(engine: Engine, oracle: Oracle) -> None:
    for seq, count in enumerate((20, 16, 0, 3)):
        if count:
            append(engine, seq, words(engine, seq, 0, count))
    engine.remove(-1, 15)
    assert [engine.length(seq) for seq in range(4)] == [15, 15, 0, 3]
    for seq in range(4):
        start = engine.length(seq)
        oracle.check(engine, seq, words(engine, seq, start, start + 6))
    engine.remove(-1, -1)
    assert [engine.length(seq) for seq in range(4)] == [0] * 4
    append(engine, 3, [5, 6])
    engine.clear(-1)
    assert [engine.length(seq) for seq in range(4)] == [0] * 4


@pytest.mark.parametrize("span", [(0, 3), (-1, 3), (2, 9), (18, 19)])
def test_a_range_in_the_middle_is_refused(engine: Engine, span: tuple[int, int]) -> None:
    append(engine, 0, words(engine, 0, 0, 20))
    refused(engine, lambda e: e.remove(0, *span), RewindError, "while .* to 19 stay")


def test_shift_and_divide_are_refused(engine: Engine) -> None:
    append(engine, 1, words(engine, 1, 0, 14))
    pattern = "block phase and stored rows depend on the absolute position"
    refused(engine, lambda e: e.shift(1, 0, -1, 5), UsageError, pattern)
    refused(engine, lambda e: e.divide(1, 0, -1, 2), UsageError, pattern)


@pytest.mark.parametrize("seq", [4, -2, 99])
def test_an_id_without_a_slot_is_refused(engine: Engine, seq: int) -> None:
    append(engine, 0, words(engine, 0, 0, 14))
    edits: tuple[Edit, ...] = (
        lambda e: e.remove(seq, 0),
        lambda e: e.clear(seq),
        lambda e: e.clear(seq, data=True),
        lambda e: e.copy(0, seq),
        lambda e: e.copy(seq, 0),
        lambda e: e.keep(seq),
        lambda e: e.tokens(seq),
        lambda e: e.reachable(seq),
    )
    for edit in edits:
        refused(engine, edit, UsageError, f"no sequence {seq}; this bundle holds 0 to 3")


def expected_bytes(engine: Engine, length: int, written: int) -> int:
    """Live bytes of a sequence cut from `written` to `length` tokens, counted by hand.

    Window 7, longest step 24, budget 8; blocks of 4 over 8 rows, and of 12.
    """
    held = {
        CacheKind.RAW: length - max(0, written - (7 + 24 + 8)),
        CacheKind.CSA: length // 4,
        CacheKind.LID: length // 4,
        CacheKind.HCA: length // 12,
        CacheKind.CSA_STATE: length - max(0, written - 16),
        CacheKind.LID_STATE: length - max(0, written - 16),
        CacheKind.HCA_STATE: length - max(0, written - 20),
    }
    return sum(held[spec.kind] * spec.width * 4 for spec in engine.manifest.contract.caches)


@pytest.mark.parametrize("length", [0, 1, 7, 12, 23, 40, 61])
def test_a_copy_onto_a_dirty_slot(engine: Engine, oracle: Oracle, length: int) -> None:
    """A11, A30: both sides go on differently; what was moved is what was live."""
    append(engine, 2, words(engine, 6, 0, 70))
    if length:
        append(engine, 0, words(engine, 0, 0, length))
    before = snapshot(engine)
    assert engine.copy(0, 2) == expected_bytes(engine, length, length)
    after = snapshot(engine)
    for spec in engine.manifest.contract.caches:
        base = spec.layout.base(2)
        own = range(base, base + spec.layout.rows_per_stream)
        assert changed_rows(spec, before, after) <= set(own), spec.name
    assert engine.tokens(2) == engine.tokens(0)
    assert engine.reachable(2) == engine.reachable(0)
    oracle.check(engine, 2, words(engine, 3, 0, 14))
    oracle.check(engine, 0, words(engine, 0, length, length + 14))
    oracle.check(engine, 2)


def test_a_copy_of_a_rejected_sequence(engine: Engine, oracle: Oracle) -> None:
    """Rejected rows stay behind, the reach comes along."""
    append(engine, 3, words(engine, 3, 0, 45))
    engine.remove(3, 41)
    assert engine.copy(3, 1) == expected_bytes(engine, 41, 45)
    assert engine.reachable(1) == engine.reachable(3)
    for position in (41, 40, 37):
        if any(position in span for span in engine.reachable(1)):
            engine.remove(1, position)
        oracle.check(engine, 1)
    start = engine.length(1)
    oracle.check(engine, 1, words(engine, 5, 0, 13))
    assert start in (37, 40)
    oracle.check(engine, 3, words(engine, 3, 41, 50))


def test_a_copy_onto_itself_does_nothing(engine: Engine) -> None:
    append(engine, 1, words(engine, 1, 0, 20))
    before = snapshot(engine), engine.tokens(1), engine.reachable(1)
    assert engine.copy(1, 1) == 0
    assert same_bits(before[0], snapshot(engine))
    assert (engine.tokens(1), engine.reachable(1)) == before[1:]


def test_keep_forgets_all_but_one(engine: Engine, oracle: Oracle) -> None:
    for seq in range(4):
        append(engine, seq, words(engine, seq, 0, 15 + seq))
    engine.keep(2)
    assert [engine.length(seq) for seq in range(4)] == [0, 0, 17, 0]
    for seq in range(4):
        start = engine.length(seq)
        oracle.check(engine, seq, words(engine, seq, start, start + 9))


@pytest.mark.parametrize("data", [False, True])
def test_clear_changes_no_byte_of_others(engine: Engine, oracle: Oracle, data: bool) -> None:
    """A37: `data` zeroes the whole block of that stream, in every cache; without it nothing."""
    for seq in range(4):
        append(engine, seq, words(engine, seq, 0, 60))
    before = snapshot(engine)
    engine.clear(1, data=data)
    after = snapshot(engine)
    for spec in engine.manifest.contract.caches:
        base = spec.layout.base(1)
        own = slice(base, base + spec.layout.rows_per_stream)
        assert changed_rows(spec, before, after) <= set(range(own.start, own.stop))
        assert not data or not after[spec.name][own].any()
    assert data or same_bits(before, after)
    assert engine.length(1) == 0
    for seq in range(4):
        start = engine.length(seq)
        oracle.check(engine, seq, words(engine, seq, start, start + 13))


def test_neighbours_never_show(engine: Engine) -> None:
    """A37: B's logits are bit-equal while A is absent, present, edited and reset mid-way."""

    def play(*edits: Edit) -> list[np.ndarray]:
        engine.clear()
        rows = []
        for i in range(3):
            if i < len(edits):
                edits[i](engine)
            start = engine.length(1)
            rows.append(append(engine, 1, words(engine, 1, start, start + 9)))
        return rows

    alone = play()
    grown = play(*[lambda e: append(e, 0, words(e, 0, e.length(0), e.length(0) + 11))] * 3)
    edited = play(
        lambda e: append(e, 0, words(e, 0, 0, 30)),
        lambda e: e.remove(0, 26),
        lambda e: e.clear(0, data=True),
    )
    for run in (grown, edited):
        assert all(np.array_equal(a, b) for a, b in zip(alone, run, strict=True))
