"""What an engine asks of the memory of its sequences, whatever the family keeps in it.

Bookkeeping only: rows are named here and moved by `rows.py`. Every question that an edit depends on
is asked of all components before anything changes, and the strictest answer counts.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cachegraph.models.contract import CacheKind
from cachegraph.models.errors import RewindError, UsageError
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.coupled import placed_text
from cachegraph.runtime.planners.step import StepPlan
from cachegraph.runtime.saved import SavedSequence
from cachegraph.runtime.split import UBatch


class RowMove(NamedTuple):
    """Rows of one cache kind to copy, as global row numbers of equal count."""

    kind: CacheKind
    source: IntArray
    target: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRows:
    """The rows of one sequence that a save keeps, by cache kind, oldest first.

    Raw rows are those of the pinned positions and of raw_first .. length - 1, state rows of a
    compressor those of state_first .. length - 1, compressed rows those of every finished block.
    Attention rows are those of every token, recurrent states those after length - depth .. length
    tokens. A kind that is not named can be made from the others.
    """

    length: int
    rows: Mapping[CacheKind, IntArray]
    raw_first: int = 0
    raw_pinned: int = 0
    state_first: Mapping[CacheKind, int]
    depth: int = 0


PositionChange = Callable[[IntArray], IntArray]


class Moved(NamedTuple):
    """Tokens of a sequence at other positions.

    ranks: which tokens. positions: [n] of them afterwards. rows: [n] of their keys. steps: [n] by
    which each moves. stale: the position from which pools are made anew.
    """

    seq_id: int
    ranks: slice
    positions: IntArray
    rows: IntArray
    steps: IntArray
    stale: int


class SequenceMemory(ABC):
    """The sequences of an engine: what each holds, where it can stand, which rows an edit moves."""

    def __init__(self, streams: int) -> None:
        self._edits = [(0, "")] * streams
        self._rewrites = [0] * streams

    @property
    def ids(self) -> range:
        """Every sequence id."""
        return range(len(self._edits))

    def edits(self, seq_id: int) -> tuple[int, str]:
        """How often a sequence was edited other than by a step, and the last edit in words."""
        return self._edits[seq_id]

    def rewrites(self, seq_id: int) -> int:
        """How often a sequence was edited so that the tokens it kept may be others."""
        return self._rewrites[seq_id]

    @abstractmethod
    def length(self, seq_id: int) -> int:
        """Tokens held."""

    @abstractmethod
    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The token ids held, in their order."""

    @abstractmethod
    def next_positions(self) -> dict[int, int]:
        """The lowest position that every sequence takes next."""

    def following(self, seq_id: int) -> int:
        """The position of the token that follows in a text."""
        return self.length(seq_id)

    def places(self, seq_id: int) -> IntArray | None:
        """Positions t, y and x of each token, [n, 3]; None where a token has one position."""
        return None

    def text(self, seq_id: int) -> Sequence[Hashable]:
        """The token ids held, with their positions where a token has three."""
        places = self.places(seq_id)
        tokens = self.tokens(seq_id)
        return tokens if places is None else placed_text(tokens, places)

    @property
    def has_places(self) -> bool:
        """Whether a token has three positions."""
        return False

    @abstractmethod
    def count_before(self, seq_id: int, position: int) -> int:
        """Tokens of a sequence below a position."""

    @abstractmethod
    def check_room(self, ubatches: Iterable[UBatch]) -> None:
        """CapacityError unless all ubatches of a batch can be placed one after another."""

    @abstractmethod
    def plan(self, ubatch: UBatch) -> StepPlan:
        """Plan one call; changes nothing. CapacityError or PlanError."""

    @abstractmethod
    def commit(self, plan: StepPlan) -> None:
        """Take a step that has run."""

    @abstractmethod
    def clear(self, seq_id: int, how: str = "cleared") -> None:
        """Forget a sequence. how: the edit in words."""

    @abstractmethod
    def kept(self, seq_id: int) -> None:
        """Told after every sequence but one was cleared."""

    @abstractmethod
    def can_stand(self, seq_id: int, length: int) -> bool:
        """Whether a sequence can be cut to `length` tokens and go on as if never longer."""

    @abstractmethod
    def reachable(self, seq_id: int) -> tuple[range, ...]:
        """Every length that the sequence can be cut to, as ascending ranges."""

    @abstractmethod
    def cut(self, seq_id: int, length: int) -> None:
        """Take back all tokens from number `length` on; `check_cut` was passed. Copies nothing."""

    def moved(self, seq_id: int, first: int, end: int, change: PositionChange) -> Moved:
        """What tokens at positions first .. end - 1 would become; changes nothing.

        UsageError where the family's rows depend on their positions, or this sequence's tokens
        cannot move.
        """
        raise UsageError(
            "positions cannot be changed: block phase and stored rows depend on the absolute "
            "position; decode the text again at its new positions"
        )

    def move(self, moved: Moved) -> None:
        """Take what `moved` said, after the keys were turned."""
        raise NotImplementedError

    @abstractmethod
    def own_rows(self, seq_id: int) -> Mapping[CacheKind, IntArray]:
        """Rows of the kinds that sequences may share which no other uses, ascending."""

    @abstractmethod
    def live_rows(self, source: int, target: int) -> list[RowMove]:
        """The rows to copy so that stream `target` holds what `source` holds."""

    @abstractmethod
    def copied(self, source: int, target: int) -> None:
        """Make `target` the equal of `source`, whose live rows were copied."""

    @abstractmethod
    def stored(self, seq_id: int) -> StoredRows:
        """Where the rows of a sequence lie, for a save."""

    @abstractmethod
    def slots_for(self, seq_id: int, saved: SavedSequence) -> StoredRows:
        """The saved rows that a sequence would have here; the oldest of them may find no room.

        Where sequences may share rows these get their places when the sequence is `restored`.
        CapacityError where the context is too short, StateFileError where a row is missing that
        the sequence needs.
        """

    @abstractmethod
    def restored(
        self, seq_id: int, rows: StoredRows, tokens: Sequence[int], places: IntArray | None
    ) -> None:
        """Make a sequence what was saved; `stored` then says where its rows go."""

    @abstractmethod
    def slots_to_resume(self, seq_id: int, saved: SavedSequence) -> StoredRows:
        """Where the states of a partial state go; the sequence holds its tokens.

        StateFileError where other rows are missing that they need.
        """

    @abstractmethod
    def resumed(self, seq_id: int, rows: StoredRows) -> None:
        """Cut a sequence to where a partial state stands, whose rows are then written."""

    def digest(self, seq_id: int, length: int) -> str:
        """Of the first `length` tokens of a sequence and their positions."""
        found = hashlib.sha256(np.array(self.tokens(seq_id)[:length], np.int64).tobytes())
        if (places := self.places(seq_id)) is not None:
            found.update(places[:length].tobytes())
        return found.hexdigest()

    def reusable(self, seq_id: int, tokens: Sequence[int]) -> int:
        """How many of `tokens` need no decoding: the longest common prefix with what is held.

        Cut back to where the sequence can stand, and to leave one token to decode.
        """
        common = common_prefix(self.tokens(seq_id), tokens)
        length = min(common, len(tokens) - 1)
        while length > 0 and not self.can_stand(seq_id, length):
            length -= 1
        return max(0, length)

    def check_cut(self, seq_id: int, length: int) -> None:
        """RewindError that names the reachable lengths, unless the sequence can stand there."""
        if self.can_stand(seq_id, length):
            return
        spans = ", ".join(
            str(r.start) if len(r) == 1 else f"{r.start} to {r.stop - 1}"
            for r in self.reachable(seq_id)
        )
        raise RewindError(
            f"sequence {seq_id} holds {self.length(seq_id)} tokens and cannot be cut to "
            f"{length}; it can stand at {spans}; rewind there and decode the rest again, or "
            "export with a larger --rewind"
        )

    def _edited(self, seq_id: int, how: str) -> None:
        self._rewrites[seq_id] += how != "cut"
        self._edits[seq_id] = (self._edits[seq_id][0] + 1, how)


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


def ranges(values: Iterable[int]) -> tuple[range, ...]:
    """Ascending values as ranges."""
    spans: list[range] = []
    for value in values:
        if spans and spans[-1].stop == value:
            spans[-1] = range(spans[-1].start, value + 1)
        else:
            spans.append(range(value, value + 1))
    return tuple(spans)
