"""The sequences of an engine: what each holds, where it can stand, and which rows an edit moves.

Bookkeeping only: rows are named here and moved by `rows.py`. Every question that an edit depends on
is asked of all components before anything changes, and the strictest answer counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cachegraph.models.contract import CacheKind, Contract
from cachegraph.models.errors import CapacityError, RewindError, StateFileError
from cachegraph.models.planner_specs import PlannerSpecs
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.cells import Reservation
from cachegraph.runtime.split import UBatch
from cachegraph.runtime.unified_cells import cell_table


@dataclass(slots=True)
class _History:
    """What one sequence holds.

    tokens: ids by position. state_first: of each compressor, the first position from which on its
    ring holds the state rows; taking tokens back does not bring overwritten rows back.
    written: one past the highest position whose state row was written since it was empty.
    """

    tokens: list[int] = field(default_factory=list)
    state_first: dict[CacheKind, int] = field(default_factory=dict)
    written: int = 0


class RowMove(NamedTuple):
    """Rows of one cache kind to copy, as global row numbers of equal count."""

    kind: CacheKind
    source: IntArray
    target: IntArray


class StoredRows(NamedTuple):
    """The rows of one sequence, by cache kind, in the order of their positions.

    Raw rows are those of the pinned positions and of raw_first .. length - 1, state rows those of
    state_first .. length - 1, compressed rows those of every finished block.
    """

    length: int
    raw_first: int
    raw_pinned: int
    state_first: dict[CacheKind, int]
    rows: dict[CacheKind, IntArray]


class SequenceTable:
    """Cells, histories and reach of every sequence."""

    def __init__(self, contract: Contract, specs: PlannerSpecs) -> None:
        self._contract = contract
        self._compressors = specs.compressors
        self._raw = specs.raw_rows
        self.cells = cell_table(contract.layout(CacheKind.RAW), specs.raw_rows)
        self._histories = [_History() for _ in range(self.cells.layout.streams)]
        self._edits = [(0, "")] * self.cells.layout.streams
        self._rewrites = [0] * self.cells.layout.streams

    @property
    def ids(self) -> range:
        """Every sequence id."""
        return range(self.cells.layout.streams)

    def edits(self, seq_id: int) -> tuple[int, str]:
        """How often a sequence was edited other than by a step, and the last edit in words."""
        return self._edits[seq_id]

    def written(self, seq_id: int) -> int:
        """One past the highest position whose state row was written since it was empty."""
        return self._histories[seq_id].written

    def length(self, seq_id: int) -> int:
        """Tokens held: the position expected next."""
        return self.cells.next_position(seq_id)

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The token ids held, by position."""
        return tuple(self._histories[seq_id].tokens)

    def commit(self, reservation: Reservation, ubatch: UBatch) -> None:
        """Take a step that has run."""
        self.cells.commit(reservation)
        for stream, tokens in zip(
            ubatch.streams, ubatch.tokens.reshape(-1, ubatch.step), strict=True
        ):
            history = self._histories[stream]
            history.tokens += tokens.tolist()
            history.written = max(history.written, len(history.tokens))
            for spec in self._compressors:
                oldest = max(0, len(history.tokens) - spec.ring_rows)
                history.state_first[spec.kind] = max(
                    history.state_first.get(spec.kind, 0), oldest
                )

    def clear(self, seq_id: int, how: str = "cleared") -> None:
        """Forget a sequence. how: the edit in words."""
        self.cells.clear(seq_id)
        self._histories[seq_id] = _History()
        self._edited(seq_id, how)

    def can_stand(self, seq_id: int, position: int) -> bool:
        """Whether the sequence can be cut to `position` tokens and go on as if never longer.

        Asked of every component: state rows of the open windows must not be overwritten, and raw
        rows that the next token sees must still be held. Compressed rows are hidden by counts.
        """
        length = self.length(seq_id)
        if position in (0, length):
            return True
        if not 0 < position < length:
            return False
        oldest = self._raw.oldest_needed(position)
        first = self._histories[seq_id].state_first
        return self._states_held(position, first) and self.cells.holds(
            seq_id, oldest, position
        )

    def rows_held(self, position: int, reached: int, ring_written: int | None) -> bool:
        """Whether a sequence that once stood at or before `position` still has the rows it needs.

        Unlike `can_stand` it may be asked forward, of tokens that were rejected by the last move:
        their rows stay until others take them. reached: one past the highest position that got a
        row since it stood there. ring_written: one past the highest that ever got a state row;
        None where a copy serves these.
        """
        if position == 0:
            return True
        if ring_written is not None:
            first = {s.kind: ring_written - s.ring_rows for s in self._compressors}
            if not self._states_held(position, first):
                return False
        oldest = self._raw.oldest_needed(position)
        return position <= self._raw.pinned or oldest >= reached - self.cells.ring

    def move_to(self, seq_id: int, base: int, tokens: Sequence[int], written: int) -> None:
        """End a sequence after `tokens`, which follow its first `base` ones. Copies nothing.

        `rows_held` was asked. The tokens may be some that were rejected before.
        """
        length, position = self.length(seq_id), base + len(tokens)
        history = self._histories[seq_id]
        if position < length:
            self.cells.truncate(seq_id, position)
            del history.tokens[position:]
        elif position > length:
            self.cells.place(seq_id, length, position)
            history.tokens += tokens[length - base :]
        history.written = written if position else 0
        history.state_first = {
            spec.kind: min(position, max(0, history.written - spec.ring_rows))
            for spec in self._compressors
        }

    def reachable(self, seq_id: int) -> tuple[range, ...]:
        """Every position the sequence can stand at, as ascending ranges."""
        length = self.length(seq_id)
        # Between the pinned rows and this one none is held; a window of one token needs none.
        low = max(0, length - self.cells.ring) if self._raw.window > 1 else 0
        pinned = range(min(self._raw.pinned, length) + 1)
        asked = (*pinned, *range(max(pinned.stop, low), length + 1))
        return _ranges(p for p in asked if self.can_stand(seq_id, p))

    def reusable(self, seq_id: int, tokens: Sequence[int]) -> int:
        """How many of `tokens` need no decoding: the longest common prefix with what is held.

        Cut back to where the sequence can stand, and to leave one token to decode.
        """
        common = common_prefix(self._histories[seq_id].tokens, tokens)
        position = min(common, len(tokens) - 1)
        while position > 0 and not self.can_stand(seq_id, position):
            position -= 1
        return max(0, position)

    def check_cut(self, seq_id: int, position: int) -> None:
        """RewindError that names the reachable positions, unless the sequence can stand there."""
        if self.can_stand(seq_id, position):
            return
        spans = ", ".join(
            str(r.start) if len(r) == 1 else f"{r.start} to {r.stop - 1}"
            for r in self.reachable(seq_id)
        )
        raise RewindError(
            f"sequence {seq_id} holds {self.length(seq_id)} tokens and cannot be cut to "
            f"{position}; it can stand at {spans}; rewind there and decode the rest again, or "
            "export with a larger --rewind"
        )

    def cut(self, seq_id: int, position: int) -> None:
        """Take back all tokens from `position` on; `check_cut` was passed. Copies nothing."""
        if position == self.length(seq_id):
            return
        if position == 0:
            self.clear(seq_id)
            return
        self.cells.truncate(seq_id, position)
        history = self._histories[seq_id]
        del history.tokens[position:]
        history.state_first = {k: min(p, position) for k, p in history.state_first.items()}
        self._edited(seq_id, "cut")

    def live_rows(self, source: int, target: int) -> list[RowMove]:
        """The rows to copy so that stream `target` holds what `source` holds."""
        moves = [RowMove(CacheKind.RAW, *self.cells.moves(source, target))]
        length, first = self.length(source), self._histories[source].state_first
        for spec in self._compressors:
            ring = np.arange(first.get(spec.kind, 0), length) % spec.ring_rows
            for rows, state in spec.serves:
                moves.append(self._move(rows, source, target, np.arange(length // spec.ratio)))
                moves.append(self._move(state, source, target, ring))
        return moves

    def copied(self, source: int, target: int) -> None:
        """Make `target` the equal of `source`, whose live rows were copied."""
        self.clear(target)
        self.cells.copy(source, target)
        history = self._histories[source]
        self._histories[target] = _History(
            list(history.tokens), dict(history.state_first), history.written
        )
        self._edited(target, "copied over")

    def stored(self, seq_id: int) -> StoredRows:
        """Where the rows of a sequence lie, by position, for a save."""
        length, history = self.length(seq_id), self._histories[seq_id]
        raw_first = self.cells.first_held(seq_id)
        state_first = {
            spec.kind: history.state_first.get(spec.kind, 0) for spec in self._compressors
        }
        return self._rows_at(seq_id, length, raw_first, state_first)

    def slots_for(
        self, seq_id: int, length: int, raw_first: int, state_first: Mapping[CacheKind, int]
    ) -> StoredRows:
        """The saved rows that a sequence would have here; the oldest of them may find no room.

        In a unified cache raw rows get their places when the sequence is `restored`.
        CapacityError where the context is too short, StateFileError where a row is missing that
        the sequence needs.
        """
        pinned = min(self._raw.pinned, length)
        raw = max(raw_first, length - self.cells.ring, pinned)
        states = {
            spec.kind: max(state_first.get(spec.kind, length), length - spec.ring_rows)
            for spec in self._compressors
        }
        for spec in self._compressors:
            if length // spec.ratio > self._contract.layout(spec.kind).rows_per_stream:
                raise CapacityError(
                    f"a saved sequence of {length} tokens does not fit this bundle's context; "
                    "export with a larger --context"
                )
            if states[spec.kind] > spec.oldest_needed(length):
                raise StateFileError(
                    f"{spec.kind.value} state rows begin at {states[spec.kind]}, the open "
                    f"window at {spec.oldest_needed(length)}"
                )
        if raw > self._raw.oldest_needed(length):
            raise StateFileError(f"raw rows begin at {raw}, inside the window")
        return self._rows_at(seq_id, length, raw, states)

    def restored(self, seq_id: int, rows: StoredRows, tokens: Sequence[int]) -> None:
        """Make a sequence what was saved; `stored` then says where its rows go."""
        self.clear(seq_id)
        self.cells.place(seq_id, 0, rows.raw_pinned)
        self.cells.place(seq_id, rows.raw_first, rows.length)
        written = rows.length
        for spec in self._compressors:
            first = rows.state_first[spec.kind]
            if first:  # older rows are not here: as if later ones had replaced them
                written = max(written, first + spec.ring_rows)
        self._histories[seq_id] = _History(
            [int(t) for t in tokens], dict(rows.state_first), written
        )
        self._edited(seq_id, "restored")

    def _states_held(self, position: int, first: Mapping[CacheKind, int]) -> bool:
        """Whether rings that hold state rows from `first` on serve the windows at `position`.

        A block that has not begun needs no rows, whatever the ring holds.
        """
        return all(
            spec.oldest_needed(position) >= min(position, first[spec.kind])
            for spec in self._compressors
        )

    def rewrites(self, seq_id: int) -> int:
        """How often a sequence was edited so that the tokens it kept may be others."""
        return self._rewrites[seq_id]

    def _edited(self, seq_id: int, how: str) -> None:
        self._rewrites[seq_id] += how != "cut"
        self._edits[seq_id] = (self._edits[seq_id][0] + 1, how)

    def _rows_at(
        self, seq_id: int, length: int, raw_first: int, state_first: Mapping[CacheKind, int]
    ) -> StoredRows:
        layout = self._contract.layout
        pinned = min(self._raw.pinned, length)
        positions = np.concatenate((np.arange(pinned), np.arange(raw_first, length)))
        rows = {CacheKind.RAW: self.cells.rows_of(seq_id, positions)}
        for spec in self._compressors:
            ring = np.arange(state_first[spec.kind], length) % spec.ring_rows
            for kind, state in spec.serves:
                rows[kind] = layout(kind).base(seq_id) + np.arange(length // spec.ratio)
                rows[state] = layout(state).base(seq_id) + ring
        return StoredRows(length, raw_first, pinned, dict(state_first), rows)

    def _move(self, kind: CacheKind, source: int, target: int, offsets: IntArray) -> RowMove:
        layout = self._contract.layout(kind)
        return RowMove(kind, layout.base(source) + offsets, layout.base(target) + offsets)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two texts share. Halves the span that differs, comparing slices."""
    one, other = tuple(one), tuple(other)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _ranges(values: Iterable[int]) -> tuple[range, ...]:
    spans: list[range] = []
    for value in values:
        if spans and spans[-1].stop == value:
            spans[-1] = range(spans[-1].start, value + 1)
        else:
            spans.append(range(value, value + 1))
    return tuple(spans)
