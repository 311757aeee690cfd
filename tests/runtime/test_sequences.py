"""The sequence table against a dictionary model: reach, cuts, copies, saved rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_world import config
from support.sequence_model import SequenceWorld, StateFile, rows_in_use

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind
from cachegraph.models.deepseek_v4.config import LayerKind
from cachegraph.models.errors import CapacityError, RewindError, StateFileError
from cachegraph.runtime.saved import SavedSequence

pytestmark = pytest.mark.r0

SEQUENCES = 3
Op = tuple[str, int, int, int]


def world(
    *,
    window: int = 5,
    ratios: tuple[int, int] = (3, 7),
    layers: Sequence[LayerKind] = tuple(LayerKind),
    **sizes: int,
) -> SequenceWorld:
    model = config(window=window, csa_ratio=ratios[0], hca_ratio=ratios[1], layers=layers)
    usual = {"context": 40, "sequences": SEQUENCES, "max_step": 6, "rewind": 3}
    return SequenceWorld(model, Capacity(**{**usual, **sizes}))


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    """Operations with three numbers each; what they mean is settled when they run."""
    names = ("append", "append", "append", "cut", "cut", "copy", "clear", "save", "restore")
    number = st.integers(0, 60)
    operation = st.tuples(st.sampled_from(names), number, number, number)
    return draw(st.lists(operation, min_size=1, max_size=25))


def run(worlds: Sequence[SequenceWorld], program: Sequence[Op]) -> None:
    """Play a program over several worlds that exchange saved sequences; judge every step."""
    files: list[StateFile] = []
    for name, first, second, third in program:
        here = worlds[first // SEQUENCES % len(worlds)]
        seq, other = first % SEQUENCES, second % SEQUENCES
        room = here.capacity.context - len(here.texts[seq])
        match name:
            case "append" if room:
                here.append(seq, 1 + second % min(room, 14))
            case "cut":
                # Mostly near the end, where there is something to reach.
                length = len(here.texts[seq])
                here.cut(seq, length - second % 12 if third % 3 else second % (length + 1))
            case "copy" if seq != other:
                here.copy(seq, other)
            case "clear":
                here.clear(seq)
            case "save":
                files.append(here.save(seq))
            case "restore" if files:
                file = files[second % len(files)]
                if file.stored.length <= here.capacity.context:
                    here.restore(file, seq)
        for one in worlds:
            one.judge()


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    program=programs(),
    window=st.integers(1, 8),
    ratios=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    rewinds=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    max_steps=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    pinned=st.sampled_from([0, 0, 1, 4, 11]),
)
def test_a_position_is_claimed_exactly_where_all_its_rows_are_there(
    program: list[Op],
    window: int,
    ratios: tuple[int, int],
    rewinds: tuple[int, int],
    max_steps: tuple[int, int],
    pinned: int,
) -> None:
    sizes = zip(rewinds, max_steps, (40, 31), strict=True)
    worlds = [
        world(
            window=window,
            ratios=ratios,
            rewind=rewind,
            max_step=step,
            context=context,
            pinned=pinned,
        )
        for rewind, step, context in sizes
    ]
    run(worlds, program)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(program=programs(), layers=st.sets(st.sampled_from(tuple(LayerKind)), min_size=1))
def test_so_it_is_for_models_that_lack_a_compressor(
    program: list[Op], layers: set[LayerKind]
) -> None:
    run([world(layers=sorted(layers)), world(layers=sorted(layers), rewind=0)], program)


@pytest.mark.parametrize("rewind", [0, 1, 3, 8])
def test_the_rewind_budget_is_reachable_at_every_phase(rewind: int) -> None:
    """Right after a step of any length, and after several."""
    for length in range(1, 40):
        for chunk in (1, 4, 6):
            here = world(rewind=rewind)
            for start in range(0, length, chunk):
                here.append(0, min(chunk, length - start))
            here.judge()
            for taken in range(min(rewind, length) + 1):
                assert here.table.can_stand(0, length - taken), (length, taken)


def test_a_refused_cut_names_where_the_sequence_can_stand() -> None:
    here = world(rewind=1)
    here.append(0, 20)
    before = rows_in_use(here)
    with pytest.raises(RewindError) as caught:
        here.table.check_cut(0, 5)
    message = str(caught.value)
    assert "sequence 0 holds 20 tokens and cannot be cut to 5" in message
    assert "it can stand at 0, 18 to 20" in message
    assert "--rewind" in message
    assert np.array_equal(before, rows_in_use(here))


def test_a_copy_moves_live_rows_and_no_others() -> None:
    """Rows of rejected tokens stay behind; every live row is counted once."""
    here = world(rewind=3)
    here.append(0, 20)
    here.cut(0, 18)
    moves = {move.kind: move.source.tolist() for move in here.table.live_rows(0, 2)}
    ring = 2 * 3 + 3
    assert moves[CacheKind.CSA_STATE] == [p % ring for p in range(20 - ring, 18)]
    assert moves[CacheKind.LID_STATE] == moves[CacheKind.CSA_STATE]
    assert moves[CacheKind.HCA_STATE] == [p % 10 for p in range(10, 18)]
    assert moves[CacheKind.CSA] == list(range(6))
    assert moves[CacheKind.HCA] == [0, 1]
    size = 5 + 6 + 3
    assert sorted(moves[CacheKind.RAW]) == sorted(p % size for p in range(20 - size, 18))
    here.copy(0, 2)
    here.judge()


def test_questions_change_nothing() -> None:
    here = world()
    here.append(0, 17)
    here.append(1, 4)
    before = rows_in_use(here)
    table = here.table
    for seq in range(SEQUENCES):
        table.reachable(seq)
        table.stored(seq)
        table.live_rows(seq, 2)
        table.slots_for(seq, saved(9, 0, {CacheKind.CSA: 0, CacheKind.HCA: 0}))
    assert np.array_equal(before, rows_in_use(here))


def saved(length: int, raw_first: int, state_first: dict[CacheKind, int]) -> SavedSequence:
    return SavedSequence(seq_id=0, length=length, raw_first=raw_first, state_first=state_first)


def test_a_saved_sequence_that_lacks_rows_or_is_too_long_has_no_slots() -> None:
    table = world(context=20).table
    firsts = {CacheKind.CSA: 0, CacheKind.HCA: 0}
    with pytest.raises(CapacityError, match="25 tokens does not fit"):
        table.slots_for(0, saved(25, 0, firsts))
    with pytest.raises(StateFileError, match="raw rows begin at 13, inside the window"):
        table.slots_for(0, saved(16, 13, firsts))
    with pytest.raises(
        StateFileError, match="csa state rows begin at 13, the open window at 12"
    ):
        table.slots_for(0, saved(16, 0, {**firsts, CacheKind.CSA: 13}))
    with pytest.raises(
        StateFileError, match="hca state rows begin at 16, the open window at 14"
    ):
        table.slots_for(0, saved(16, 0, {CacheKind.CSA: 0}))


@pytest.mark.parametrize("length", [0, 1, 4, 5, 9, 14, 20, 21, 38])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_saved_sequence_takes_its_whole_reach_along(length: int, taken: int) -> None:
    """Into an engine with more room it loses nothing; into one with less, what has no room."""
    here, more, less = world(), world(rewind=9, max_step=9), world(rewind=1, max_step=2)
    if length:
        here.append(0, length)
    here.cut(0, max(0, length - taken))
    file = here.save(0)
    assert file.stored.raw_first == min(file.stored.length, max(0, length - (5 + 6 + 3)))
    for there in (more, less):
        there.append(1, 17)
        there.restore(file, 1)
        there.judge()
    assert more.table.reachable(1) == here.table.reachable(0)
    back = world()
    back.restore(more.save(1), 2)
    assert back.table.reachable(2) == here.table.reachable(0)
    if less.texts[1] != ():
        less.append(1, 1)
        less.judge()


def test_a_cut_to_a_block_edge_needs_no_rows_of_the_ring() -> None:
    """The ring holds 17 .. 19; a block that begins at 12 fills it anew."""
    here = world(layers=[LayerKind.WINDOW, LayerKind.HCA], ratios=(2, 3), max_step=9, rewind=0)
    here.append(0, 20)
    here.judge()
    here.cut(0, 12)
    here.append(0, 3)
    here.judge()
    assert here.table.can_stand(0, 14)


def test_a_window_of_one_token_holds_nothing_back() -> None:
    here = world(layers=[LayerKind.WINDOW], window=1, max_step=2, rewind=0)
    here.append(0, 30)
    assert here.table.reachable(0) == (range(31),)
    here.cut(0, 5)
    here.restore(here.save(0), 1)
    here.append(1, 1)
    here.judge()
