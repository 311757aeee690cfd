"""The bookkeeping of checkpoints, without an engine: records, voids, rows by number."""

from __future__ import annotations

import numpy as np
import pytest
from support.plan_world import World, config

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, CacheSpec, Contract, DType, RowLayout
from cachegraph.models.errors import ConfigError, ContractError, RewindError
from cachegraph.runtime.checkpoint_book import Book, Mode, Rewound, check_max_tokens
from cachegraph.runtime.checkpoint_rows import StateCopies
from cachegraph.runtime.sequences import SequenceTable
from cachegraph.runtime.split import UBatch
from cachegraph.tools.conformance.checkpoints import HostRows

pytestmark = pytest.mark.r0

RINGS = {CacheKind.CSA_STATE: 6, CacheKind.HCA_STATE: 9}


def book(mode: Mode = Mode.DELTA, max_tokens: int = 5) -> Book:
    made = Book(mode, max_tokens, RINGS)
    made.save({0: (4, 4), 1: (10, 12)})
    return made


def test_tokens_are_numbered_from_the_save() -> None:
    made = book()
    assert made.note(0, [4, 5], [70, 71]) == range(2)
    assert made.note(1, [10], [80]) == range(1)
    assert made.note(0, [6], [72]) == range(2, 3)
    record = made.check(0, 3)
    assert (record.base, record.written, record.tokens) == (4, 7, [70, 71, 72])
    assert made.check(1, 1).written == 12
    assert made.note(7, [0], [1]) is None


def test_tokens_after_a_rejection_take_the_numbers_of_rejected_ones() -> None:
    made = book()
    made.note(0, [4, 5, 6, 7], [70, 71, 72, 73])
    made.check(0, 1).standing = 1
    assert made.note(0, [5, 6], [90, 91]) == range(1, 3)
    record = made.check(0, 3)
    assert record.tokens == [70, 90, 91]
    assert record.written == 8
    with pytest.raises(RewindError, match="4 tokens cannot be accepted; 0 to 3 were decoded"):
        made.check(0, 4)


def test_the_last_token_of_a_ring_row_is_kept() -> None:
    made = book(max_tokens=8)
    made.note(0, [4, 5, 6, 7], [1] * 4)
    made.note(0, [8, 9, 10, 11], [1] * 4)
    rows = made.kept_rows(0, 8)
    assert rows[CacheKind.CSA_STATE] == {4: 6, 5: 7, 0: 2, 1: 3, 2: 4, 3: 5}
    assert made.kept_rows(0, 2)[CacheKind.HCA_STATE] == {4: 0, 5: 1}


def test_more_tokens_than_prepared_void_one_sequence() -> None:
    made = book()
    made.note(0, [4, 5, 6], [1] * 3)
    made.note(1, [10], [1])
    assert made.note(0, [7, 8, 9], [1] * 3) is None
    assert (made.is_void(0), made.is_void(1)) == (True, False)
    with pytest.raises(RewindError, match=r"void: 6 tokens were decoded .*, 5 were prepared"):
        made.check(0, 1)


def test_a_step_longer_than_a_ring_cannot_be_recorded() -> None:
    made = book(max_tokens=8)
    assert made.note(0, range(4, 11), [1] * 7) is None
    with pytest.raises(
        RewindError, match="7 tokens wrote a csa_state row twice; its ring has 6"
    ):
        made.check(0, 0)
    ring = book(Mode.RING)
    assert ring.note(0, range(4, 11), [1] * 7) is None
    assert ring.check(0, 7).standing == 7


def test_the_first_reason_of_a_void_stays_until_the_next_save() -> None:
    made = book()
    made.void(0, "it was dropped")
    made.void(0, "other")
    with pytest.raises(RewindError, match="sequence 0 is void: it was dropped"):
        made.check(0, 0)
    made.save({0: (0, 0)})
    assert made.check(0, 0).base == 0
    made.discard()
    with pytest.raises(RewindError, match="no checkpoint is saved"):
        made.check(0, 0)


@pytest.mark.parametrize("count", [-1, 0, 9])
def test_limits_are_named(count: int) -> None:
    check_max_tokens(Mode.DELTA, 8, 8)
    check_max_tokens(Mode.DELTA, 1, 8)
    with pytest.raises(ConfigError, match=f"a delta .* 1 to 8 tokens of a seq.*, not {count}"):
        check_max_tokens(Mode.DELTA, count, 8)


def test_answers_read_as_words() -> None:
    assert str(Rewound()) == "direct"
    assert str(Rewound(9)) == "replay from 9"


def copies(mode: Mode) -> tuple[StateCopies, np.ndarray]:
    layout = RowLayout(rows_per_stream=6, streams=2, spare_rows=3)
    spec = CacheSpec(
        layer=3, kind=CacheKind.CSA_STATE, dtype=DType.FLOAT32, width=2, layout=layout
    )
    binder = HostRows()
    cache = binder.cache(np.arange(30, dtype=np.float32).reshape(15, 2), DType.FLOAT32)
    contract = Contract(rows=(), caches=(spec,))
    return StateCopies(mode, 4, RINGS, contract, binder, {spec.name: cache}), cache.array


@pytest.mark.parametrize("mode", [Mode.DELTA, Mode.SHADOW, Mode.HOST])
def test_restoring_moves_the_rings_of_one_stream(mode: Mode) -> None:
    made, cache = copies(mode)
    before = cache.copy()
    made.save()
    cache[...] = -1
    made.restore(1, {})
    assert (cache[6:12] == before[6:12]).all()
    assert (cache[:6] == -1).all()
    assert (cache[12:] == -1).all()


@pytest.mark.parametrize(
    ("stream", "kept"), [(2, {}), (0, {6: 0}), (0, {-1: 0}), (0, {1: 4}), (0, {1: -1})]
)
def test_what_does_not_fit_is_refused_before_a_row_moves(
    stream: int, kept: dict[int, int]
) -> None:
    made, cache = copies(Mode.DELTA)
    made.save()
    cache[...] = -1
    with pytest.raises(ContractError, match=r"does not fit stream .* nothing was restored"):
        made.restore(stream, {CacheKind.CSA_STATE: kept})
    assert (cache == -1).all()


def table(count: int) -> SequenceTable:
    """Sequence 1 with `count` tokens; window 5, 5 + 6 + 5 raw rows, rings of 6 + 5 and 7 + 5."""
    world = World(config(), Capacity(context=200, sequences=2, max_step=6, rewind=5))
    made = SequenceTable(world.contract, world.specs)
    for position in range(count):
        give(made, position)
    return made


def give(made: SequenceTable, position: int) -> None:
    ubatch = UBatch(
        streams=(1,),
        step=1,
        tokens=np.array([position]),
        positions=np.array([position]),
        wants_logits=np.zeros(1, np.bool_),
        source=np.zeros(1, np.int64),
    )
    made.commit(made.plan(ubatch))


def test_moving_back_and_forth_is_the_same_as_never_having_moved() -> None:
    made = table(30)
    view = made.cells.after(made.cells.reserve(_empty()))
    for length in (26, 29, 25, 30):
        assert made.rows_held(length, 30, 30)
        made.move_to(1, 25, list(range(25, length)), 30)
        assert made.tokens(1) == tuple(range(length))
        assert made.length(1) == length
    again = made.cells.after(made.cells.reserve(_empty()))
    assert (view.positions == again.positions).all()
    assert (view.members == again.members).all()
    assert made.edits(1) == (0, "")


def _empty() -> UBatch:
    none = np.zeros(0, np.int64)
    return UBatch(
        streams=(1,),
        step=0,
        tokens=none,
        positions=none,
        wants_logits=np.zeros(0, np.bool_),
        source=none,
    )


def test_rows_are_held_back_to_what_rings_and_window_kept() -> None:
    made = table(60)
    window, rows = made.cells.raw.window, made.cells.layout.rows_per_stream
    oldest = 60 - rows + window - 1
    assert made.rows_held(oldest, 60, None)
    assert not made.rows_held(oldest - 1, 60, None)
    rings = [p for p in range(40, 61) if made.rows_held(p, 60, 60)]
    assert rings == [p for p in range(40, 61) if made.can_stand(1, p)]
    made.move_to(1, oldest, [], 60)
    assert made.rows_held(oldest + 3, 60, None)
    assert not made.rows_held(oldest - 1, 60, None)
    made.move_to(1, 0, [], 60)
    assert made.written(1) == 0


@pytest.mark.parametrize(
    ("edit", "word"), [("clear", "cleared"), ("cut", "cut"), ("copied", "copied over")]
)
def test_edits_are_counted_and_named(edit: str, word: str) -> None:
    made = table(30)
    before = made.edits(1)[0]
    if edit == "clear":
        made.clear(1)
    elif edit == "cut":
        made.cut(1, 30)
        assert made.edits(1)[0] == before
        made.cut(1, 28)
    else:
        made.copied(0, 1)
    assert made.edits(1)[0] > before
    assert made.edits(1)[1] == word
