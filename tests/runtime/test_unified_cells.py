"""One pool of raw cells: no row that may still be read is overwritten, and no cell is lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_world import config
from support.sequence_model import as_saved

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, RowSharing
from cachegraph.models.deepseek_v4.contract import contract, planner_specs
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.sequences import SequenceTable
from cachegraph.runtime.split import UBatch
from cachegraph.runtime.unified_cells import UnifiedCells, cell_table

pytestmark = pytest.mark.r0

SEQUENCES = 3
Op = tuple[str, int, int, int]


class Pool:
    """A unified table, what lies in each cell, and a per-stream table that does the same.

    A cell's label is the text up to the token that wrote it.
    """

    def __init__(self, capacity: Capacity, window: int) -> None:
        model = config(window=window)
        specs = planner_specs(model, capacity)
        self.pinned, self.window = capacity.pinned, window
        self.context, self.max_step = capacity.context, capacity.max_step
        self.ours, self.other = (
            SequenceTable(contract(model, capacity, None, raw), specs)
            for raw in (RowSharing.UNIFIED, RowSharing.PER_STREAM)
        )
        self.texts: list[tuple[int, ...]] = [()] * SEQUENCES
        self.cells: dict[int, tuple[int, ...]] = {}
        self.count = 0

    def append(self, seqs: Sequence[int], step: int) -> None:
        """So many tokens for each of some sequences, in one call."""
        room = self.context - max(len(self.texts[seq]) for seq in seqs)
        step = min(step, room, self.max_step)
        if not step:
            return
        ubatch = self._ubatch(seqs, step)
        before = self._state()
        reservation = self.ours.cells.reserve(ubatch)
        view = self.ours.cells.after(reservation)
        assert self._state() == before, "planning changed the table"
        assert len(set(reservation.rows.tolist())) == len(reservation.rows)
        self.other.commit(self.other.plan(ubatch))
        self.ours.commit(self.ours.plan(ubatch))
        assert np.array_equal(view.positions, self.ours.cells._positions[:-1])
        assert np.array_equal(view.members, self.ours.cells._members[:, :-1])
        tokens = ubatch.tokens.reshape(len(seqs), step).tolist()
        for seq, new, rows in zip(
            seqs, tokens, reservation.rows.reshape(len(seqs), step).tolist(), strict=True
        ):
            for token, row in zip(new, rows, strict=True):
                self.texts[seq] += (token,)
                self.cells[row] = self.texts[seq]

    def cut(self, seq: int, position: int) -> None:
        if self.other.can_stand(seq, position):
            for table in (self.ours, self.other):
                table.cut(seq, position)
            self.texts[seq] = self.texts[seq][:position]

    def back_and_forth(self, seq: int, taken: int) -> None:
        """Reject tokens, let the others write, and take them back again, as a checkpoint may."""
        length = len(self.texts[seq])
        written = self.ours.written(seq)
        base = length - min(taken, length)
        if not self.other.rows_held(base, length, written):
            return
        rejected = self.texts[seq][base:]
        self.ours.move_to(seq, base, [], written)
        others = [s for s in range(SEQUENCES) if s != seq]
        self.texts[seq] = self.texts[seq][:base]
        self.append(others, 4)
        self.judge_rows()
        if base:
            self.ours.move_to(seq, base, rejected, written)
            self.texts[seq] += rejected
        else:
            self.clear(seq)

    def copy(self, source: int, target: int) -> None:
        assert all(
            m.kind is not CacheKind.RAW or not m.source.size
            for m in self.ours.live_rows(source, target)
        )
        for table in (self.ours, self.other):
            table.copied(source, target)
        self.texts[target] = self.texts[source]

    def clear(self, seq: int) -> None:
        for table in (self.ours, self.other):
            table.clear(seq)
        self.texts[seq] = ()

    def restore(self, source: int, target: int) -> None:
        """What a file of one sequence holds goes into another slot, in cells of its own."""
        stored = self.ours.stored(source)
        labels = [self.cells[row] for row in stored.rows[CacheKind.RAW].tolist()]
        for table in (self.ours, self.other):
            rows = table.slots_for(target, as_saved(stored))
            table.restored(target, rows, self.texts[source], None)
        self.texts[target] = self.texts[source]
        places = self.ours.stored(target).rows[CacheKind.RAW].tolist()
        self.cells |= dict(zip(places, labels, strict=True))

    def judge_rows(self) -> None:
        """Whatever a cell is said to hold is in it; users are counted right."""
        cells = self.ours.cells
        assert isinstance(cells, UnifiedCells)
        for seq, text in enumerate(self.texts):
            owned = cells._members[seq].nonzero()[0].tolist()
            held = {int(cells._positions[cell]): self.cells[cell] for cell in owned}
            assert held == {p: text[: p + 1] for p in held}
            first = max(0, len(text) - self.window + 1)
            assert {*range(first, len(text)), *range(min(self.pinned, len(text)))} <= set(held)
        slots = cells._slots[cells._slots >= 0]
        counted = np.bincount(slots, minlength=cells.layout.live_rows)
        assert np.array_equal(counted, cells._users[:-1])
        empty = ~cells._members.any(axis=0)
        assert (cells._positions[empty] == -1).all()

    def judge(self) -> None:
        self.judge_rows()
        for seq, text in enumerate(self.texts):
            assert self.ours.tokens(seq) == self.other.tokens(seq) == text
            assert self.ours.reachable(seq) == self.other.reachable(seq)

    def _state(self) -> list[list[int]]:
        cells = self.ours.cells
        assert isinstance(cells, UnifiedCells)
        arrays = (cells._positions, cells._members, cells._ends, cells._slots, cells._users)
        return [array.ravel().tolist() for array in arrays]

    def _ubatch(self, seqs: Sequence[int], step: int) -> UBatch:
        size = len(seqs) * step
        tokens = np.arange(self.count, self.count + size)
        self.count += size
        starts = np.array([len(self.texts[seq]) for seq in seqs])
        return UBatch(
            tokens=tokens,
            positions=(starts[:, None] + np.arange(step)).ravel(),
            streams=tuple(seqs),
            step=step,
            source=np.arange(size),
            wants_logits=Batch.of(tokens).wants_logits,
        )


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    names = ("append",) * 4 + ("copy", "copy", "cut", "forth", "clear", "restore")
    number = st.integers(0, 60)
    operation = st.tuples(st.sampled_from(names), number, number, number)
    return draw(st.lists(operation, min_size=1, max_size=25))


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    program=programs(),
    window=st.integers(1, 6),
    max_step=st.integers(1, 6),
    rewind=st.integers(0, 4),
    pinned=st.sampled_from([0, 0, 2, 7]),
)
def test_no_cell_in_use_is_overwritten_and_none_is_lost(
    program: list[Op], window: int, max_step: int, rewind: int, pinned: int
) -> None:
    sizes = {"context": 60, "sequences": SEQUENCES, "max_step": max_step}
    pool = Pool(Capacity(**sizes, rewind=rewind, pinned=pinned), window)
    for name, first, second, third in program:
        seq, other = first % SEQUENCES, second % SEQUENCES
        match name:
            case "append":
                seqs = [s for s in range(SEQUENCES) if first >> s & 1] or [seq]
                pool.append(seqs, 1 + third % 6)
            case "copy" if seq != other:
                pool.copy(seq, other)
            case "cut":
                pool.cut(seq, max(0, len(pool.texts[seq]) - third % 8))
            case "forth":
                pool.back_and_forth(seq, third % 5)
            case "clear":
                pool.clear(seq)
            case "restore" if seq != other:
                pool.restore(seq, other)
        pool.judge_rows()
    for seq in range(SEQUENCES):
        pool.clear(seq)
    cells = pool.ours.cells
    assert isinstance(cells, UnifiedCells)
    assert not cells._users[:-1].any(), "a cell was not found again"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(program=programs(), window=st.integers(1, 6), rewind=st.integers(0, 4))
def test_its_reach_is_that_of_a_table_without_sharing(
    program: list[Op], window: int, rewind: int
) -> None:
    sizes = {"context": 60, "sequences": SEQUENCES, "max_step": 4, "pinned": 2}
    pool = Pool(Capacity(**sizes, rewind=rewind), window)
    for name, first, second, third in program:
        seq, other = first % SEQUENCES, second % SEQUENCES
        match name:
            case "append":
                pool.append([seq], 1 + third % 6)
            case "copy" | "restore" if seq != other:
                pool.copy(seq, other) if name == "copy" else pool.restore(seq, other)
            case "cut":
                pool.cut(seq, max(0, len(pool.texts[seq]) - third % 8))
            case "clear":
                pool.clear(seq)
        pool.judge()


def test_a_full_pool_that_is_shared_has_a_cell_for_every_writer() -> None:
    """Three sequences use every cell, then all share one's; all write at once, again and again."""
    pool = Pool(Capacity(context=90, sequences=SEQUENCES, max_step=6, rewind=2), 5)
    for seq in range(SEQUENCES):
        for _ in range(5):
            pool.append([seq], 6)
    cells = pool.ours.cells
    assert isinstance(cells, UnifiedCells)
    assert cells._users[:-1].tolist() == [1] * cells.layout.live_rows
    pool.copy(1, 0)
    pool.copy(1, 2)
    assert sorted(set(cells._users[:-1].tolist())) == [0, 3]
    for _ in range(6):
        pool.append([0, 1, 2], 5)
        pool.judge()
    assert cells._users[:-1].tolist() == [1] * cells.layout.live_rows


def test_a_copy_takes_no_cell_and_a_write_takes_one() -> None:
    pool = Pool(Capacity(context=90, sequences=SEQUENCES, max_step=6, rewind=2), 5)
    pool.append([0], 6)
    pool.copy(0, 1)
    cells = pool.ours.cells
    assert isinstance(cells, UnifiedCells)
    assert (cells._users > 0)[:-1].sum() == 6
    pool.append([1], 1)
    assert (cells._users > 0)[:-1].sum() == 7
    pool.clear(0)
    assert (cells._users > 0)[:-1].sum() == 7
    pool.clear(1)
    assert not (cells._users > 0)[:-1].any()


def test_the_layout_says_which_table_it_wants() -> None:
    capacity = Capacity(context=20, sequences=2)
    for raw in RowSharing:
        specs = planner_specs(config(), capacity)
        layout = contract(config(), capacity, None, raw).layout(CacheKind.RAW)
        made = cell_table(layout, specs.raw)
        assert isinstance(made, UnifiedCells) is (raw is RowSharing.UNIFIED)
