"""Window memory: the sequences of a family that keeps raw rows, compressed rows and state rings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cachegraph.models.contract import CacheKind, Contract
from cachegraph.models.errors import CapacityError, StateFileError
from cachegraph.models.planner_specs import PlannerSpecs
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.planners.step import StepPlan, StepSizes, plan_step
from cachegraph.runtime.saved import SavedSequence
from cachegraph.runtime.sequence_memory import (
    RowMove,
    SequenceMemory,
    StoredRows,
    ranges,
)
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


class SequenceTable(SequenceMemory):
    """Window memory: cells, histories and reach of every sequence."""

    def __init__(self, contract: Contract, specs: PlannerSpecs) -> None:
        super().__init__(contract.layout(CacheKind.RAW).streams)
        self._sizes = StepSizes.of(specs, contract)
        self._contract = contract
        self._compressors = specs.compressors
        self._raw = specs.raw_rows
        self.cells = cell_table(contract.layout(CacheKind.RAW), specs.raw_rows)
        self._histories = [_History() for _ in range(self.cells.layout.streams)]

    def written(self, seq_id: int) -> int:
        """One past the highest position whose state row was written since it was empty."""
        return self._histories[seq_id].written

    def length(self, seq_id: int) -> int:
        """Tokens held: the position expected next."""
        return self.cells.next_position(seq_id)

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The token ids held, by position."""
        return tuple(self._histories[seq_id].tokens)

    def next_positions(self) -> dict[int, int]:
        """The position that every sequence expects next."""
        return self.cells.next_positions()

    def count_before(self, seq_id: int, position: int) -> int:
        """Tokens of a sequence below a position."""
        return min(position, self.length(seq_id))

    def check_room(self, ubatches: Iterable[UBatch]) -> None:
        """As of `SequenceMemory`; a single ubatch is checked when it is planned."""
        parts = tuple(ubatches)
        if len(parts) > 1:
            self.cells.check_room(parts)

    def plan(self, ubatch: UBatch) -> StepPlan:
        """As of `plan_step`."""
        return plan_step(self._sizes, self.cells, ubatch)

    def commit(self, plan: StepPlan) -> None:
        """Take a step that has run."""
        self.cells.commit(plan.reservation)
        ubatch = plan.ubatch
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

    def kept(self, seq_id: int) -> None:
        """Nothing more to do."""

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
        return ranges(p for p in asked if self.can_stand(seq_id, p))

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

    def own_rows(self, seq_id: int) -> dict[CacheKind, IntArray]:
        """Raw rows that no other sequence uses."""
        return {CacheKind.RAW: self.cells.own_rows(seq_id)}

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

    def slots_for(self, seq_id: int, saved: SavedSequence) -> StoredRows:
        """As of `SequenceMemory`."""
        length, state_first = saved.length, saved.state_first
        pinned = min(self._raw.pinned, length)
        raw = max(saved.raw_first, length - self.cells.ring, pinned)
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

    def restored(
        self, seq_id: int, rows: StoredRows, tokens: Sequence[int], places: IntArray | None
    ) -> None:
        """Make a sequence what was saved; `stored` then says where its rows go."""
        self.clear(seq_id)
        self.cells.place(seq_id, 0, rows.raw_pinned)
        self.cells.place(seq_id, rows.raw_first, rows.length)
        self._histories[seq_id] = _History(
            [int(t) for t in tokens], dict(rows.state_first), self._written(rows)
        )
        self._edited(seq_id, "restored")

    def slots_to_resume(self, seq_id: int, saved: SavedSequence) -> StoredRows:
        """Rows of the state rings; StateFileError where raw rows of the window are gone."""
        length = saved.length
        oldest = self._raw.oldest_needed(length)
        if length and not self.cells.holds(seq_id, oldest, length):
            raise StateFileError(
                f"its window at {length} tokens has been overwritten; restore a whole state"
            )
        held = saved.model_copy(update={"raw_first": oldest})
        stored = self.slots_for(seq_id, held)
        states = {kind: rows for kind, rows in stored.rows.items() if kind.is_state}
        return replace(stored, rows=states)

    def resumed(self, seq_id: int, rows: StoredRows) -> None:
        """Cut a sequence to where a partial state stands."""
        history, length = self._histories[seq_id], rows.length
        if length < self.length(seq_id):
            self.cells.truncate(seq_id, length)
        del history.tokens[length:]
        history.state_first = dict(rows.state_first)
        history.written = self._written(rows)
        self._edited(seq_id, "resumed")

    def _written(self, rows: StoredRows) -> int:
        """Older state rows are not here: as if later ones had replaced them."""
        ends = (
            first + spec.ring_rows
            for spec in self._compressors
            if (first := rows.state_first[spec.kind])
        )
        return max((rows.length, *ends))

    def _states_held(self, position: int, first: Mapping[CacheKind, int]) -> bool:
        """Whether rings that hold state rows from `first` on serve the windows at `position`.

        A block that has not begun needs no rows, whatever the ring holds.
        """
        return all(
            spec.oldest_needed(position) >= min(position, first[spec.kind])
            for spec in self._compressors
        )

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
        return StoredRows(
            length=length,
            rows=rows,
            raw_first=raw_first,
            raw_pinned=pinned,
            state_first=dict(state_first),
        )

    def _move(self, kind: CacheKind, source: int, target: int, offsets: IntArray) -> RowMove:
        layout = self._contract.layout(kind)
        return RowMove(kind, layout.base(source) + offsets, layout.base(target) + offsets)
