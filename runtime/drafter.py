"""Drafts tokens with a bundle's draft graph, and keeps its rows warm while the main graph decodes.

The pair of position p, token p with the streams of position p - 1, is one row of the draft graph.
Pairs are run lazily: those that the next draft needs go with it, older ones when the streams kept
would no longer reach them. Edits of a sequence are found by comparing its tokens, so that an edit
that nobody told the drafter of can cost a warm start and never a wrong row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CARRIED, LOGITS, STREAMS, CacheKind
from cachegraph.models.errors import StepError, UsageError
from cachegraph.models.manifest import DraftEntry, Manifest
from cachegraph.runtime.batch import Batch, IntArray
from cachegraph.runtime.binding import Binder, BoundCall, Buffer, allocate_caches
from cachegraph.runtime.carried import Carried, Rows
from cachegraph.runtime.cells import CellTable
from cachegraph.runtime.draft_asked import draft_count, token_id
from cachegraph.runtime.memory import initial_caches
from cachegraph.runtime.opening import OpenGraph
from cachegraph.runtime.part import GraphPart
from cachegraph.runtime.planners.step import StepSizes, pick_bucket, plan_step
from cachegraph.runtime.rows import copy_rows, zero_rows
from cachegraph.runtime.saved import SavedDraft, rows_name
from cachegraph.runtime.sequence_memory import RowMove, SequenceMemory, common_prefix
from cachegraph.runtime.split import UBatch, split_batch

Choose = Callable[[int, Rows], int]
_LOG = logging.getLogger(__name__)


class _Pairs(NamedTuple):
    """Pairs of one sequence from position `first` on: tokens, and the streams before each."""

    first: int
    tokens: list[int]
    carried: Rows

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + len(self.tokens)


_BySequence = Mapping[int, Rows]


class Drafter:
    """The draft graph of an engine, its raw rows, and what each sequence carries."""

    def __init__(
        self,
        entry: DraftEntry,
        graph: GraphPart,
        binder: Binder,
        caches: dict[str, Buffer],
        table: SequenceMemory,
        capacity: Capacity,
    ) -> None:
        """caches: buffers of the draft graph's raw cache, by name. table: the main sequences."""
        self.entry = entry
        self.graph = graph
        self._contract = entry.contract
        self._binder = binder
        self._caches = caches
        self._table = table
        self._capacity = capacity
        self._sizes = StepSizes.of(entry.planners, self._contract)
        self.cells = CellTable(self._contract.layout(CacheKind.RAW), entry.planners.raw_rows)
        self._carried = [Carried.of(entry.hidden) for _ in table.ids]

    @classmethod
    def open(cls, manifest: Manifest, opened: OpenGraph, table: SequenceMemory) -> Drafter:
        """Allocate the draft graph's caches; CapacityError, with nothing kept, where that fails."""
        entry = manifest.draft
        if entry is None:
            raise UsageError("this bundle has no draft graph")
        contract, binder = opened.contract, opened.binder
        caches = allocate_caches(binder, contract, initial_caches(contract))
        results = {LOGITS, STREAMS}
        graph = GraphPart(opened.session, binder, contract, entry.planners, caches, results)
        return cls(entry, graph, binder, caches, table, manifest.capacity)

    def close(self) -> None:
        """Free session, caches and buffers."""
        self.graph.close()
        self._caches.clear()

    def note(self, ubatch: UBatch, fetch: Callable[[], Rows], padded_step: int) -> None:
        """Take a main step that is in. fetch: reads its streams [T, width], stream-major.

        Runs pairs only where the step is too long for them to wait. Whatever fails here costs the
        sequences their warm start, not the step.
        """
        try:
            late = self._learn(ubatch, fetch(), padded_step)
            if late:
                self._run(late)
        except Exception as error:
            seqs = list(ubatch.streams)
            _LOG.warning("a step is in, drafts of sequences %s start anew: %s", seqs, error)
            self._lose(seqs)

    def _learn(self, ubatch: UBatch, streams: Rows, padded_step: int) -> dict[int, _Pairs]:
        """Keep the streams of a step; the pairs that cannot wait."""
        late: dict[int, _Pairs] = {}
        for place, seq in enumerate(ubatch.streams):
            entry, row = place * ubatch.step, place * padded_step
            start = int(ubatch.positions[entry])
            tokens = ubatch.tokens[entry : entry + ubatch.step].tolist()
            late |= self._take(seq, start, tokens, streams[row : row + ubatch.step])
        return late

    def draft(
        self, pending: Mapping[int, int], counts: Mapping[int, int], choose: Choose
    ) -> dict[int, list[int]]:
        """As of `Engine.draft`."""
        vocab, capacity = int(self._contract[LOGITS].shape[-1]), self._capacity
        pending = {seq: token_id(seq, token, vocab) for seq, token in pending.items()}
        counts = {
            seq: draft_count(seq, counts.get(seq), self._table.length(seq), capacity)
            for seq in pending
        }
        drafts: dict[int, list[int]] = {seq: [] for seq in pending}
        pairs = {seq: pair for seq in pending if (pair := self._newest(seq, pending[seq]))}
        ends = {seq: pair.end for seq, pair in pairs.items()}
        try:
            while pairs:
                logits, streams = self._run_or_drop(pairs)
                following = {}
                for seq, pair in pairs.items():
                    drafts[seq].append(token_id(seq, choose(seq, logits[seq]), vocab))
                    if len(drafts[seq]) < counts[seq]:
                        following[seq] = _Pairs(pair.end, drafts[seq][-1:], streams[seq])
                pairs = following
        finally:
            for seq, end in ends.items():
                self._settle(seq, end, pending[seq])
        return drafts

    def copy(self, source: int, target: int) -> int:
        """Make `target` what `source` is, after the table was; returns the bytes moved.

        Where the rows cannot be moved, `target` starts anew.
        """
        self._lose([target])
        carried = self._synced(source, self._table.length(source))
        move = RowMove(CacheKind.RAW, *self.cells.moves(source, target))
        moved = copy_rows(self._binder, self._contract, self._caches, [move])
        self.cells.copy(source, target)
        self._carried[target].take(carried)
        self._carried[target].rewrites = self._table.rewrites(target)
        return moved

    def zero(self, seq: int) -> None:
        """Forget a sequence and zero its rows."""
        self._begin(seq, 0)
        self._carried[seq].rows[:] = 0
        rows = self.cells.layout.base(seq) + np.arange(self.cells.layout.rows_per_stream)
        zero_rows(self._binder, self._contract, self._caches, CacheKind.RAW, rows)

    def stored(self, seq: int) -> tuple[SavedDraft, dict[str, Rows]]:
        """What a save keeps of a sequence, and copies of the rows by their names in the file."""
        carried = self._synced(seq, self._table.length(seq))
        if carried.ahead is not None:
            self._cut(seq, carried.end)
        first = carried.paired
        if self.cells.next_position(seq) == first:  # else all pairs wait
            first = self.cells.first_held(seq)
        places = self._places(seq, first, carried.paired)
        tensors = {rows_name(seq, CARRIED): carried.held()}
        for spec in self._contract.caches:
            values = self._binder.read_rows(self._caches[spec.name], places)
            tensors[rows_name(seq, spec.name)] = values
        saved = SavedDraft(
            first=carried.first, end=carried.end, paired=carried.paired, raw_first=first
        )
        return saved, tensors

    def restore(
        self, slot: int, saved: SavedDraft | None, tensors: Mapping[str, Rows], seq: int
    ) -> None:
        """Make a slot, whose tokens are restored, what was saved as `seq`; None starts anew.

        The tensors were checked by `check_draft`. Rows that cannot be written start it anew too.
        """
        length = self._table.length(slot)
        self._begin(slot, length)
        carried = self._carried[slot]
        carried.rewrites = self._table.rewrites(slot)
        if saved is None:
            return
        rows = tensors[rows_name(seq, CARRIED)][-carried.spec.rows :]
        carried.rows[np.arange(saved.end - len(rows), saved.end) % carried.spec.rows] = rows
        first = max(saved.raw_first, saved.paired - self.cells.ring)
        places = self._places(slot, first, saved.paired)
        for spec in self._contract.caches:
            values = tensors[rows_name(seq, spec.name)]
            kept = values[len(values) - places.size :]
            self._binder.write_rows(self._caches[spec.name], places, kept)
        self.cells.place(slot, first, saved.paired)
        carried.first, carried.paired = saved.end - len(rows), saved.paired

    def _places(self, seq: int, first: int, end: int) -> IntArray:
        """Raw rows of positions first .. end - 1."""
        return self.cells.layout.base(seq) + np.arange(first, end) % self.cells.ring

    def _take(self, seq: int, start: int, tokens: list[int], rows: Rows) -> dict[int, _Pairs]:
        """Learn the streams of a step; its pairs, with those before, where they cannot wait."""
        carried = self._synced(seq, start)
        if carried.ahead is not None and carried.ahead != tokens[0]:
            self._cut(seq, start)
        late = {}
        first = self._first_pair(seq)
        if start + len(tokens) - first >= self.entry.hidden.rows:
            # Empty where the step's first token is the sequence's, which has no pair.
            before = carried.before(first, start + 1)
            waiting = [*carried.tokens, *tokens][first:]
            late[seq] = _Pairs(first, waiting, np.concatenate((before, rows[:-1])))
        carried.ahead = None
        carried.add(tokens, rows)
        return late

    def _newest(self, seq: int, token: int) -> _Pairs | None:
        """The pairs up to the one of a token not decoded yet; None where streams are missing."""
        length = self._table.length(seq)
        carried = self._synced(seq, length)
        if not carried.can_pair:
            return None
        if carried.ahead is not None:  # drafted before, and nothing was decoded since
            self._cut(seq, length)
        first = self._first_pair(seq)
        tokens = [*carried.tokens[first:], token]
        return _Pairs(first, tokens, carried.before(first, length + 1))

    def _first_pair(self, seq: int) -> int:
        """The first pair to run. Rows before a gap are forgotten: no later pair may see them."""
        carried = self._carried[seq]
        if carried.paired < carried.first + 1:
            self.cells.clear(seq)
            carried.paired = carried.first + 1
        return carried.paired

    def _settle(self, seq: int, end: int, token: int) -> None:
        """Take back the pairs that carried the draft graph's own streams."""
        if self.cells.next_position(seq) < end:
            return
        self.cells.truncate(seq, end)
        self._carried[seq].paired, self._carried[seq].ahead = end, token

    def _synced(self, seq: int, length: int) -> Carried:
        """What is carried, after it has followed every edit of a sequence of `length` tokens."""
        carried, rewrites = self._carried[seq], self._table.rewrites(seq)
        common = min(length, carried.end)
        if rewrites != carried.rewrites:
            common = min(length, common_prefix(carried.tokens, self._table.tokens(seq)))
            carried.rewrites = rewrites
        if common < carried.end:
            self._cut(seq, common)
        if common < length:
            self._begin(seq, length)
        return carried

    def _cut(self, seq: int, position: int) -> None:
        self._carried[seq].cut(position)
        if self.cells.next_position(seq) > position:
            self.cells.truncate(seq, position)

    def _begin(self, seq: int, position: int) -> None:
        """Start anew behind `position` tokens of which nothing is known."""
        self.cells.clear(seq)
        self._carried[seq].begin_at(position, self._table.tokens(seq)[:position])

    def _lose(self, seqs: Iterable[int]) -> None:
        """Start sequences anew behind all that they hold."""
        for seq in seqs:
            self._begin(seq, self._table.length(seq))

    def _run_or_drop(self, pairs: Mapping[int, _Pairs]) -> tuple[_BySequence, _BySequence]:
        try:
            return self._run(pairs)
        except Exception as error:
            self._lose(pairs)
            raise StepError(
                f"the draft graph failed; no sequence has changed, decode without drafts: {error}"
            ) from error

    def _run(self, pairs: Mapping[int, _Pairs]) -> tuple[_BySequence, _BySequence]:
        """Run pairs; logits [vocab] and streams [1, width] of the last one of each sequence."""
        owners = np.repeat(list(pairs), [len(pair.tokens) for pair in pairs.values()])
        places = [place for pair in pairs.values() for place in range(pair.first, pair.end)]
        last = np.append(owners[1:] != owners[:-1], True)
        tokens = [token for pair in pairs.values() for token in pair.tokens]
        batch = Batch.of(tokens, places, owners.tolist(), logits=last)
        carried = np.concatenate([pair.carried for pair in pairs.values()])
        logits: dict[int, Rows] = {}
        streams: dict[int, Rows] = {}
        for ubatch in split_batch(batch, self.entry.ladder):
            call = self._step(ubatch, carried[ubatch.source])
            wanted = ubatch.wants_logits.nonzero()[0]
            rows = self.graph.result(call, LOGITS)[: wanted.size].copy()
            ends = wanted // ubatch.step * (call.dims["P"] - ubatch.step) + wanted
            for place, seq in enumerate(wanted // ubatch.step):
                logits[ubatch.streams[seq]] = rows[place]
            wide = self.graph.result(call, STREAMS)[ends]
            for place, seq in enumerate(wanted // ubatch.step):
                streams[ubatch.streams[seq]] = wide[place : place + 1]
        return logits, streams

    def _step(self, ubatch: UBatch, carried: Rows) -> BoundCall:
        plan = plan_step(self._sizes, self.cells, ubatch)
        bucket = pick_bucket(self.entry.planners, self.entry.ladder, plan)
        call = self.graph.prepare(bucket, plan, {CARRIED: carried})
        self.graph.run(call)
        self.cells.commit(plan.reservation)
        for place, seq in enumerate(ubatch.streams):
            end = int(ubatch.positions[(place + 1) * ubatch.step - 1]) + 1
            self._carried[seq].paired = end
        return call
