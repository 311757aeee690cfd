"""A dictionary model of what lies in every row of every cache, and the sequence table beside it.

A row's label is the text up to the token that wrote it, so that two rows are equal exactly when
their labels are. Rows are numbered here anew; the table under test is asked, never trusted. Tokens
are all different, so a rejected row cannot pass for one that counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np
import pytest

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.contract import contract, ladder, planner_specs
from cachegraph.models.errors import RewindError
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.saved import SavedSequence
from cachegraph.runtime.sequence_memory import StoredRows
from cachegraph.runtime.sequences import SequenceTable
from cachegraph.runtime.split import split_batch

Label = tuple[int, ...]
_tokens = count()


@dataclass(frozen=True)
class StateFile:
    """What a save writes, with labels for rows."""

    stored: StoredRows
    tokens: tuple[int, ...]
    labels: dict[CacheKind, list[Label]]


class Memory:
    """Labels by cache kind and row, for one config and capacity."""

    def __init__(self, model: DeepseekV4Config, capacity: Capacity) -> None:
        self.window, self.pinned = model.sliding_window, capacity.pinned
        layouts = {spec.kind: spec.layout for spec in contract(model, capacity).caches}
        self.sizes = {kind: layout.rows_per_stream for kind, layout in layouts.items()}
        # compressed kind -> its state ring, tokens a block, blocks a window
        every = (
            (CacheKind.CSA, CacheKind.CSA_STATE, model.csa_ratio, 2),
            (CacheKind.LID, CacheKind.LID_STATE, model.csa_ratio, 2),
            (CacheKind.HCA, CacheKind.HCA_STATE, model.hca_ratio, 1),
        )
        self.compressors = [entry for entry in every if entry[0] in layouts]
        self.rows: dict[CacheKind, dict[int, Label]] = {kind: {} for kind in layouts}

    def row(self, kind: CacheKind, seq: int, index: int) -> int:
        """The row of a stream's ring or block index; pinned raw rows come before the ring."""
        pinned = self.pinned if kind is CacheKind.RAW else 0
        if index >= pinned:
            index = pinned + (index - pinned) % (self.sizes[kind] - pinned)
        return seq * self.sizes[kind] + index

    def forget(self, seq: int) -> None:
        for kind, rows in self.rows.items():
            for index in range(self.sizes[kind]):
                rows.pop(self.row(kind, seq, index), None)

    def step(self, seq: int, text: Label, start: int) -> None:
        """One graph call that takes text[start:]; whatever a query or a block reads must be there.

        Raw rows of the whole step are written before any is read.
        """
        for pos in range(start, len(text)):
            self.rows[CacheKind.RAW][self.row(CacheKind.RAW, seq, pos)] = text[: pos + 1]
        for pos in range(start, len(text)):
            assert self.has_raw(seq, text, pos - self.window + 1, pos + 1), (
                "the window is lost"
            )
        for kind, state, ratio, blocks in self.compressors:
            for pos in range(start, len(text)):
                self.rows[state][self.row(state, seq, pos)] = text[: pos + 1]
                if (pos + 1) % ratio == 0:
                    first = pos + 1 - blocks * ratio
                    assert self.has(state, seq, text, first, pos + 1), f"{kind} block is lost"
                    block = pos // ratio
                    self.rows[kind][seq * self.sizes[kind] + block] = text[: pos + 1]

    def has(self, kind: CacheKind, seq: int, text: Label, first: int, end: int) -> bool:
        """Whether a ring holds the rows of positions first .. end - 1 of a text."""
        return all(
            self.rows[kind].get(self.row(kind, seq, pos)) == text[: pos + 1]
            for pos in range(max(0, first), end)
        )

    def has_raw(self, seq: int, text: Label, first: int, end: int) -> bool:
        """Whether the rows of positions first .. end - 1 and of the pinned ones are there."""
        pinned = self.has(CacheKind.RAW, seq, text, 0, min(self.pinned, end))
        return pinned and self.has(CacheKind.RAW, seq, text, first, end)

    def is_safe(self, seq: int, text: Label, position: int) -> bool:
        """Whether all that a sequence of that length may ever read is there."""
        if position == 0:
            return True
        if not 0 < position <= len(text):
            return False
        good = self.has_raw(seq, text, position - self.window + 1, position)
        for kind, state, ratio, blocks in self.compressors:
            opened = position - position % ratio
            good &= self.has(state, seq, text, opened - (blocks - 1) * ratio, position)
            for block in range(position // ratio):
                label = self.rows[kind].get(seq * self.sizes[kind] + block)
                good &= label == text[: (block + 1) * ratio]
        return good


class SequenceWorld:
    """A table and its memory, driven as an engine drives them."""

    def __init__(self, model: DeepseekV4Config, capacity: Capacity) -> None:
        self.capacity = capacity
        self.memory = Memory(model, capacity)
        self.table = SequenceTable(contract(model, capacity), planner_specs(model, capacity))
        self.texts: dict[int, Label] = dict.fromkeys(range(capacity.sequences), ())
        self._ladder = ladder(model, capacity)

    def append(self, seq: int, num_tokens: int) -> None:
        tokens = [next(_tokens) for _ in range(num_tokens)]
        start = len(self.texts[seq])
        batch = Batch.of(tokens, range(start, start + num_tokens), [seq] * num_tokens)
        for part in split_batch(batch, self._ladder):
            plan = self.table.plan(part)
            wanted = [self.memory.row(CacheKind.RAW, seq, p) for p in part.positions.tolist()]
            assert plan.reservation.rows.tolist() == wanted
            self.table.commit(plan)
            before = len(self.texts[seq])
            self.texts[seq] += tuple(part.tokens.tolist())
            self.memory.step(seq, self.texts[seq], before)

    def cut(self, seq: int, position: int) -> None:
        if not self.memory.is_safe(seq, self.texts[seq], position):
            with pytest.raises(RewindError, match=f"cannot be cut to {position};"):
                self.table.check_cut(seq, position)
            return
        self.table.check_cut(seq, position)
        self.table.cut(seq, position)
        self.texts[seq] = self.texts[seq][:position]
        if not position:
            self.memory.forget(seq)

    def clear(self, seq: int) -> None:
        self.table.clear(seq)
        self.texts[seq] = ()
        self.memory.forget(seq)

    def copy(self, source: int, target: int) -> int:
        """Move what the table says; returns the rows moved."""
        moves = self.table.live_rows(source, target)
        found = [[self.memory.rows[m.kind].get(r) for r in m.source.tolist()] for m in moves]
        self.memory.forget(target)
        for move, labels in zip(moves, found, strict=True):
            for row, label in zip(move.target.tolist(), labels, strict=True):
                assert label is not None, f"{move.kind}: a row that nobody wrote is copied"
                assert row // self.memory.sizes[move.kind] == target
                self.memory.rows[move.kind][row] = label
        self.table.copied(source, target)
        self.texts[target] = self.texts[source]
        return sum(len(labels) for labels in found)

    def save(self, seq: int) -> StateFile:
        """What a save would write; every label must be that of its position."""
        stored, text = self.table.stored(seq), self.texts[seq]
        assert stored.length == len(text)
        labels = {
            kind: [self.memory.rows[kind].get(row, ()) for row in rows.tolist()]
            for kind, rows in stored.rows.items()
        }
        pinned = list(_prefixes(text[: self.memory.pinned], 0, 1))
        assert labels[CacheKind.RAW] == pinned + list(_prefixes(text, stored.raw_first, 1))
        for kind, state, ratio, _ in self.memory.compressors:
            shared = CacheKind.CSA if kind is CacheKind.LID else kind
            assert labels[kind] == list(_prefixes(text, ratio - 1, ratio))
            assert labels[state] == list(_prefixes(text, stored.state_first[shared], 1))
        return StateFile(stored, self.table.tokens(seq), labels)

    def restore(self, file: StateFile, slot: int) -> None:
        old = file.stored
        rows = self.table.slots_for(slot, as_saved(old))
        self.memory.forget(slot)
        for kind, labels in file.labels.items():
            targets = rows.rows[kind].tolist()
            assert len(set(targets)) == len(targets)
            pinned = labels[: rows.raw_pinned if kind is CacheKind.RAW else 0]
            kept = pinned + labels[len(labels) - len(targets) + len(pinned) :]
            for row, label in zip(targets, kept, strict=True):
                assert row // self.memory.sizes[kind] == slot
                self.memory.rows[kind][row] = label
        self.table.restored(slot, rows, file.tokens, None)
        self.texts[slot] = file.tokens

    def judge(self) -> None:
        """Lengths, tokens and reach of every sequence, position for position."""
        for seq, text in self.texts.items():
            assert self.table.length(seq) == len(text)
            assert self.table.tokens(seq) == text
            asked = range(-1, len(text) + 2)
            safe = [p for p in asked if self.memory.is_safe(seq, text, p)]
            assert [p for p in asked if self.table.can_stand(seq, p)] == safe
            spans = self.table.reachable(seq)
            assert [p for span in spans for p in span] == safe
            assert all(a.stop < b.start for a, b in pairwise(spans))


def _prefixes(text: Label, first: int, step: int) -> Iterator[Label]:
    """Labels of every position from `first` on, in steps."""
    return (text[: p + 1] for p in range(first, len(text), step))


def rows_in_use(world: SequenceWorld) -> np.ndarray:
    """Copies of the table's own arrays, to see that a question changed nothing."""
    cells = world.table.cells
    return np.concatenate([cells._positions, cells._members.ravel(), cells._ends])


def as_saved(stored: StoredRows) -> SavedSequence:
    """What a file says of stored rows."""
    return SavedSequence(
        seq_id=0,
        length=stored.length,
        raw_first=stored.raw_first,
        state_first=dict(stored.state_first),
    )
