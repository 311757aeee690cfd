"""Hybrid memory: attention rows with pooled keys, recurrent states and token histories together.

One cell table serves attention and indexer rows. A step asks the recurrent states first, then the
cells; so does an edit, which changes nothing where one of them refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import MAY_SHARE, CacheKind, Contract, RowLayout
from cachegraph.models.errors import StateFileError, UsageError
from cachegraph.models.planner_specs import PlannerSpecs
from cachegraph.models.recurrent_spec import START, RecurrentSpec
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.cells import Reservation
from cachegraph.runtime.hybrid_cells import HybridCells
from cachegraph.runtime.planners.ngram import plan_ngram, validate_ngram
from cachegraph.runtime.planners.pool_validate import validate_pool_tokens, validate_pooled
from cachegraph.runtime.planners.pooled import Layouts, PooledPlan, PoolTokens, plan_pooled
from cachegraph.runtime.planners.recurrent import (
    RecurrentPlan,
    Standing,
    plan_recurrent,
    validate_recurrent,
)
from cachegraph.runtime.planners.step import StepPlan
from cachegraph.runtime.saved import SavedSequence
from cachegraph.runtime.sequence_memory import (
    Moved,
    PositionChange,
    RowMove,
    SequenceMemory,
    StoredRows,
    ranges,
)
from cachegraph.runtime.split import UBatch
from cachegraph.runtime.stale import StaleMarks


class HybridMemory(SequenceMemory):
    """Cells, pools, states and tokens of every sequence; each part only where the family has it."""

    def __init__(self, contract: Contract, specs: PlannerSpecs, capacity: Capacity) -> None:
        super().__init__(capacity.sequences)
        self._specs = specs
        self._attention = tuple(kind for kind in MAY_SHARE if contract.has(kind))
        kinds = dict.fromkeys(spec.kind for spec in contract.caches)
        self._states = tuple(kind for kind in kinds if kind.is_recurrent)
        self._start = contract.layout(self._states[0]).sentinel(START) if self._states else 0
        self.cells = HybridCells(_cell_layout(contract, capacity))
        self._tokens: list[list[int]] = [[] for _ in self.ids]
        self._standings = [Standing() for _ in self.ids]
        self._layouts: Layouts = {}
        self._stale = StaleMarks(capacity.sequences)

    @property
    def has_places(self) -> bool:
        """Whether a token has three positions."""
        return self._specs.pooled is not None and self._specs.pooled.has_places

    def length(self, seq_id: int) -> int:
        """Tokens held."""
        return self.cells.count(seq_id)

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The token ids held, in their order."""
        return tuple(self._tokens[seq_id])

    def places(self, seq_id: int) -> IntArray | None:
        """Positions t, y and x of each token, [n, 3]."""
        return self.cells.places(seq_id) if self.has_places else None

    def following(self, seq_id: int) -> int:
        """One past the highest of the last token's positions, as the published model counts on."""
        last = self.cells.last_place(seq_id)
        return 0 if last is None else int(last.max()) + 1

    def next_positions(self) -> dict[int, int]:
        """The lowest position that every sequence takes next: its last one may repeat."""
        lasts = {seq: self.cells.last_place(seq) for seq in self.ids}
        return {seq: 0 if last is None else int(last[0]) for seq, last in lasts.items()}

    def count_before(self, seq_id: int, position: int) -> int:
        """Tokens of a sequence below a position."""
        return int(self.cells.positions(seq_id).searchsorted(position))

    def reusable(self, seq_id: int, tokens: Sequence[int]) -> int:
        """As of `SequenceMemory`; only tokens at the positions of a text are reused."""
        places = self.cells.places(seq_id)
        is_text = (places == np.arange(len(places))[:, None]).all(axis=1)
        count = int(is_text.size if is_text.all() else is_text.argmin())
        return super().reusable(seq_id, tokens[: max(1, count + 1)])

    def check_room(self, ubatches: Iterable[UBatch]) -> None:
        """Nothing to ask: there are as many rows as all sequences together can have tokens."""

    def plan(self, ubatch: UBatch) -> StepPlan:
        """Plan one call; changes nothing. CapacityError or PlanError."""
        recurrent = self._plan_states(ubatch)
        reservation = self.cells.reserve(ubatch)
        return StepPlan(
            ubatch=ubatch,
            reservation=reservation,
            pooled=self._plan_pools(ubatch, reservation),
            recurrent=recurrent,
            ngram_ids=self._plan_ngrams(ubatch),
        )

    def commit(self, plan: StepPlan) -> None:
        """Take a step that has run; pools that it was told of as stale are made."""
        ubatch = plan.ubatch
        self.cells.commit(plan.reservation, _places(ubatch))
        for seq, tokens in zip(
            ubatch.streams, ubatch.tokens.reshape(-1, ubatch.step).tolist(), strict=True
        ):
            self._tokens[seq] += tokens
        if plan.recurrent is not None:
            for seq, standing in plan.recurrent.standings.items():
                self._standings[seq] = standing
        if plan.pooled is not None:
            self._layouts = plan.pooled.layouts
            self._stale.clear(self._stale.marks())

    def clear(self, seq_id: int, how: str = "cleared") -> None:
        """Forget a sequence. how: the edit in words."""
        self._stale.replaced(seq_id)
        self._forget(seq_id)
        self._edited(seq_id, how)

    def kept(self, seq_id: int) -> None:
        """Every sequence is pooled again, the kept one too."""
        self._stale.reset()

    def can_stand(self, seq_id: int, length: int) -> bool:
        """Whether there is a state after so many tokens; attention rows are there for all."""
        if not 0 <= length <= self.length(seq_id):
            return False
        return self._specs.recurrent is None or self._standings[seq_id].reaches(length)

    def reachable(self, seq_id: int) -> tuple[range, ...]:
        """Every length that the sequence can be cut to, as ascending ranges."""
        length = self.length(seq_id)
        low = 0 if self._specs.recurrent is None else length - self._standings[seq_id].depth
        return ranges(dict.fromkeys((0, *range(low, length + 1))))

    def cut(self, seq_id: int, length: int) -> None:
        """Take back all tokens from number `length` on; `check_cut` was passed. Copies nothing."""
        if length == self.length(seq_id):
            return
        if length == 0:
            self.clear(seq_id)
            return
        if self._specs.recurrent is not None:
            self._standings[seq_id] = self._standings[seq_id].rewound(length)
        start = int(self.cells.positions(seq_id)[length])
        self._stale.removed(seq_id, start, {seq_id: self.cells.first_position(seq_id)})
        self.cells.cut(seq_id, length)
        del self._tokens[seq_id][length:]
        self._edited(seq_id, "cut")

    def moved(self, seq_id: int, first: int, end: int, change: PositionChange) -> Moved:
        """As of `SequenceMemory`; recurrent states know no positions and stay."""
        places = self.cells.places(seq_id)
        before = places[:, 0]
        if (places != before[:, None]).any():
            raise UsageError(
                f"sequence {seq_id} holds an image, whose tokens have three positions each; they "
                "cannot be moved; decode the text again at its new positions"
            )
        if self.cells.is_shared(seq_id):
            raise UsageError(
                f"sequence {seq_id} shares rows with another one, which would move too; clear the "
                "copy, or use a bundle exported with --raw per_stream"
            )
        low, high = before.searchsorted([max(0, first), end if end >= 0 else 2**62]).tolist()
        after = before.copy()
        after[low:high] = change(before[low:high])
        if after.size and (after.min() < 0 or (np.diff(after) < 0).any()):
            raise UsageError(
                f"sequence {seq_id}: positions {first} to {end} would come to lie below 0 or out "
                "of order; the first position of a token never falls"
            )
        ranks, steps = slice(low, high), (after - before)[low:high]
        return Moved(
            seq_id=seq_id,
            ranks=ranks,
            positions=after[ranks],
            rows=self.cells.rows(seq_id)[ranks].copy(),
            steps=steps,
            stale=max(0, first) + min(0, int(steps.min(initial=0))),
        )

    def move(self, moved: Moved) -> None:
        """Take other positions; pools from the lowest of them on are made anew."""
        if not moved.rows.size:
            return
        firsts = {moved.seq_id: self.cells.first_position(moved.seq_id)}
        self._stale.removed(moved.seq_id, moved.stale, firsts)
        places = np.repeat(moved.positions[:, None], 3, axis=1)
        self.cells.move(moved.seq_id, moved.ranks, places)
        self._edited(moved.seq_id, "moved")

    def own_rows(self, seq_id: int) -> dict[CacheKind, IntArray]:
        """Attention and indexer rows that no other sequence uses, ascending."""
        return dict.fromkeys(self._attention, self.cells.own_rows(seq_id))

    def live_rows(self, source: int, target: int) -> list[RowMove]:
        """Rows to copy so that `target` holds what `source` holds; pooled keys are made anew."""
        shared = self.cells.moves(source, target)
        moves = [RowMove(kind, *shared) for kind in self._kept_attention]
        standing = self._standings[source]
        states = self._state_rows(source, standing), self._state_rows(target, standing)
        return moves + [RowMove(kind, *states) for kind in self._states]

    def copied(self, source: int, target: int) -> None:
        """Make `target` the equal of `source`, whose live rows were copied."""
        self._stale.copied(target)
        self._forget(target)
        self.cells.copy(source, target)
        self._tokens[target] = list(self._tokens[source])
        self._standings[target] = self._standings[source]
        self._edited(target, "copied over")

    def stored(self, seq_id: int) -> StoredRows:
        """Where the rows of a sequence lie, for a save; pooled keys are made anew."""
        standing = self._standings[seq_id]
        return self._stored(standing, self.cells.rows(seq_id), seq_id)

    def slots_for(self, seq_id: int, saved: SavedSequence) -> StoredRows:
        """The saved rows that a sequence would have here, as many snapshots as there is room for.

        Attention rows get their places when the sequence is `restored`.
        """
        if saved.depth > saved.length:
            raise StateFileError(
                f"{saved.depth} earlier states of a sequence of {saved.length} tokens"
            )
        spec = self._specs.recurrent
        depth = min(saved.depth, spec.snapshots) if spec is not None else 0
        standing = Standing(length=saved.length, depth=depth)
        return self._stored(standing, np.arange(saved.length), seq_id)

    def restored(
        self, seq_id: int, rows: StoredRows, tokens: Sequence[int], places: IntArray | None
    ) -> None:
        """Make a sequence what was saved; `stored` then says where its rows go."""
        self._stale.replaced(seq_id)
        self._forget(seq_id)
        if places is None:
            places = np.repeat(np.arange(rows.length)[:, None], 3, axis=1)
        self.cells.put(seq_id, places)
        self._tokens[seq_id] = [int(token) for token in tokens]
        self._standings[seq_id] = Standing(length=rows.length, depth=rows.depth)
        self._edited(seq_id, "restored")

    def slots_to_resume(self, seq_id: int, saved: SavedSequence) -> StoredRows:
        """Rows of the states after the saved number of tokens."""
        stored = self.slots_for(seq_id, saved)
        return replace(stored, rows={kind: stored.rows[kind] for kind in self._states})

    def resumed(self, seq_id: int, rows: StoredRows) -> None:
        """Cut a sequence to where a partial state stands; pooled keys stay as they are."""
        self.cells.cut(seq_id, rows.length)
        del self._tokens[seq_id][rows.length :]
        self._standings[seq_id] = Standing(length=rows.length, depth=rows.depth)
        self._edited(seq_id, "resumed")

    @property
    def _kept_attention(self) -> tuple[CacheKind, ...]:
        """Kinds whose rows cannot be made from others."""
        return tuple(kind for kind in self._attention if kind is not CacheKind.POOLED)

    def _forget(self, seq_id: int) -> None:
        self.cells.cut(seq_id, 0)
        self._tokens[seq_id] = []
        self._standings[seq_id] = Standing()

    def _plan_states(self, ubatch: UBatch) -> RecurrentPlan | None:
        spec = self._specs.recurrent
        if spec is None:
            return None
        plan = plan_recurrent(
            spec,
            streams=ubatch.streams,
            step=ubatch.step,
            standings={seq: self._standings[seq] for seq in ubatch.streams},
            start=self._start,
        )
        validate_recurrent(
            spec,
            plan,
            streams=ubatch.streams,
            sequences=len(self.ids),
            start=self._start,
        )
        return plan

    def _plan_pools(self, ubatch: UBatch, reservation: Reservation) -> PooledPlan | None:
        spec = self._specs.pooled
        if spec is None:
            return None
        tokens = PoolTokens(
            rows=reservation.rows,
            positions=reservation.positions,
            owners=tuple((seq,) for seq in reservation.sequences.tolist()),
        )
        with self.cells.trial(reservation, _places(ubatch)) as cells:
            validate_pool_tokens(cells, tokens)
            plan = plan_pooled(
                spec, cells, tokens, layouts=self._layouts, stale=self._stale.marks()
            )
            validate_pooled(spec, cells, tokens, plan)
        return plan

    def _plan_ngrams(self, ubatch: UBatch) -> IntArray | None:
        if not self._specs.ngrams:
            return None
        parts = []
        for spec in self._specs.ngrams:
            ids = plan_ngram(
                spec,
                tokens=ubatch.tokens,
                streams=ubatch.streams,
                histories={s: self._tokens[s][-spec.history :] for s in ubatch.streams},
            )
            validate_ngram(spec, ids, num_tokens=ubatch.tokens.size)
            parts.append(ids)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _state_rows(self, seq_id: int, standing: Standing) -> IntArray:
        """Rows of the states after length - depth .. length tokens; none before the first token."""
        spec = self._specs.recurrent
        if spec is None or not standing.length:
            return np.zeros(0, np.int64)
        first = max(1, standing.length - standing.depth)
        return _rows_after(spec, seq_id, first, standing.length)

    def _stored(self, standing: Standing, rows: IntArray, seq_id: int) -> StoredRows:
        states = self._state_rows(seq_id, standing)
        found: Mapping[CacheKind, IntArray] = {
            **dict.fromkeys(self._kept_attention, rows),
            **dict.fromkeys(self._states, states),
        }
        return StoredRows(
            length=rows.size, rows=found, state_first={}, depth=max(0, states.size - 1)
        )


def _rows_after(spec: RecurrentSpec, seq_id: int, first: int, last: int) -> IntArray:
    return np.array([spec.row(seq_id, length) for length in range(first, last + 1)])


def _places(ubatch: UBatch) -> IntArray:
    """Positions t, y and x of each token, [T, 3]."""
    if ubatch.places is not None:
        return ubatch.places
    return np.repeat(ubatch.positions[:, None], 3, axis=1)


def _cell_layout(contract: Contract, capacity: Capacity) -> RowLayout:
    """Rows of attention, or one for each token where no layer attends."""
    if contract.has(CacheKind.KEYS):
        return contract.layout(CacheKind.KEYS)
    return RowLayout(rows_per_stream=capacity.context, streams=capacity.sequences)
