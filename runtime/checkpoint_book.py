"""What a checkpoint remembers of each sequence: where it stood, what came since, why it is void.

Bookkeeping only: knows ring rows by number and no memory. Positions may have gaps, so that it can
be judged against recorded planner scenarios; an engine's are consecutive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from cachegraph.models.contract import CacheKind
from cachegraph.models.errors import ConfigError, RewindError

MAX_DELTA_TOKENS = 8


class Mode(StrEnum):
    """How a rewind gets the state rows back."""

    RING = "ring"  # nothing is copied: the rings have room for the rewind budget
    DELTA = "delta"  # a copy of the rings, and the state rows of each token since
    SHADOW = "shadow"  # a copy of the rings on their device; accepted tokens are decoded again
    HOST = "host"  # the same in host memory


class Rewound(NamedTuple):
    """What the caller does after `accept`: nothing, or decode again from `replay_from`."""

    replay_from: int | None = None

    @property
    def is_direct(self) -> bool:
        """Whether the sequence stands where it was asked to."""
        return self.replay_from is None

    def __str__(self) -> str:
        return "direct" if self.is_direct else f"replay from {self.replay_from}"


@dataclass(slots=True)
class Record:
    """One sequence since the save.

    base: tokens held at the save. base_written: one past the highest position whose state row was
    written by then. reached: one past the highest position since, which rejecting tokens does not
    lower. positions, tokens: of every token since, rejected ones last; the first `standing` of
    them are held.
    """

    base: int
    base_written: int
    reached: int
    positions: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    standing: int = 0
    void: str = ""

    @property
    def written(self) -> int:
        """One past the highest position whose state row was ever written."""
        return max(self.base_written, self.reached)


class Book:
    """The records of one save. `ring_rows`: state rows of a stream, by state cache kind."""

    def __init__(
        self, mode: Mode, max_tokens: int, ring_rows: Mapping[CacheKind, int]
    ) -> None:
        self.mode = mode
        self.max_tokens = max_tokens
        self.ring_rows = dict(ring_rows)
        self._records: dict[int, Record] = {}

    @property
    def is_saved(self) -> bool:
        """Whether a save is live."""
        return bool(self._records)

    def save(self, stands: Mapping[int, tuple[int, int]]) -> None:
        """Begin records. stands: (tokens held, state rows written) by sequence."""
        self._records = {
            seq: Record(base, written, base) for seq, (base, written) in stands.items()
        }

    def discard(self) -> None:
        """Forget every record."""
        self._records.clear()

    def void(self, seq: int, reason: str) -> None:
        """Make the checkpoint of a sequence unusable; the first reason stays."""
        record = self._records.get(seq)
        if record is not None and not record.void:
            record.void = reason

    def is_void(self, seq: int) -> bool:
        """Whether the checkpoint of a sequence is void."""
        record = self._records.get(seq)
        return record is not None and bool(record.void)

    def standing(self, seq: int) -> int:
        """Tokens since the save that a sequence holds."""
        record = self._records.get(seq)
        return 0 if record is None else record.standing

    def note(self, seq: int, positions: Iterable[int], tokens: Iterable[int]) -> range | None:
        """Take tokens that a sequence was given in one step.

        Rejected tokens are forgotten. Returns the numbers of the new ones, counted from the save,
        where state rows are to be recorded for them; None where none are.
        """
        record = self._records.get(seq)
        if record is None or record.void:
            return None
        del record.positions[record.standing :], record.tokens[record.standing :]
        first, added = record.standing, list(positions)
        record.positions += added
        record.tokens += tokens
        record.standing = len(record.positions)
        record.reached = max(record.reached, *(position + 1 for position in added))
        if self.mode is not Mode.DELTA:
            return None
        record.void = self._unrecordable(record, added)
        return None if record.void else range(first, record.standing)

    def check(self, seq: int, count: int) -> Record:
        """The record of a sequence that may keep `count` tokens; RewindError says why not."""
        if not self.is_saved:
            raise RewindError("no checkpoint is saved; call save() before the tokens to judge")
        record = self._records.get(seq)
        if record is None:
            raise RewindError(f"the checkpoint holds no sequence {seq}")
        if record.void:
            raise RewindError(f"the checkpoint of sequence {seq} is void: {record.void}")
        if not 0 <= count <= len(record.positions):
            raise RewindError(
                f"sequence {seq}: {count} tokens cannot be accepted; 0 to "
                f"{len(record.positions)} were decoded since the save"
            )
        return record

    def kept_rows(self, seq: int, count: int) -> dict[CacheKind, dict[int, int]]:
        """Ring row -> number of the token whose row it holds after `count` tokens, by kind."""
        positions = self._records[seq].positions[:count]
        return {
            kind: {position % size: number for number, position in enumerate(positions)}
            for kind, size in self.ring_rows.items()
        }

    def _unrecordable(self, record: Record, added: list[int]) -> str:
        """Why the state rows of a step cannot be recorded; empty where they can."""
        if record.standing > self.max_tokens:
            return (
                f"{record.standing} tokens were decoded since the save, {self.max_tokens} were "
                "prepared"
            )
        for kind, size in self.ring_rows.items():
            if len({position % size for position in added}) < len(added):
                return (
                    f"a step of {len(added)} tokens wrote a {kind.value} row twice; its ring has "
                    f"{size}"
                )
        return ""


def check_max_tokens(mode: Mode, max_tokens: int, limit: int) -> None:
    """ConfigError unless a checkpoint of this mode can be made for so many tokens."""
    if not 1 <= max_tokens <= limit:
        raise ConfigError(
            f"a {mode.value} checkpoint takes 1 to {limit} tokens of a sequence, not {max_tokens}"
            + ("; export with a larger --rewind" if mode is Mode.RING else "")
        )
