"""Checkpoints of an engine: save, decode, keep some of the tokens.

One lifecycle for every mode: `prepare` allocates, `save` marks where each sequence stands, every
decode after it is noted, `accept` keeps the first tokens since the save, `discard` forgets the
save, `release` frees the memory. What a mode copies is in `checkpoint_rows.py`, what it remembers
in `checkpoint_book.py`. An edit of a sequence (clear, remove, copy onto, restore) voids its
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from cachegraph.models.contract import CacheKind, Contract
from cachegraph.models.errors import (
    ConfigError,
    ContractError,
    RewindError,
    UsageError,
)
from cachegraph.models.planner_specs import PlannerSpecs
from cachegraph.runtime.binding import Binder, Buffer
from cachegraph.runtime.checkpoint_book import (
    MAX_DELTA_TOKENS,
    Book,
    Mode,
    Record,
    Rewound,
    check_max_tokens,
)
from cachegraph.runtime.checkpoint_rows import StateCopies, copy_bytes, state_kinds
from cachegraph.runtime.interrupts import interrupts_held
from cachegraph.runtime.sequences import SequenceTable
from cachegraph.runtime.split import UBatch

_MIB = 1024 * 1024
_log = logging.getLogger(__name__)


class Checkpoints:
    """The one checkpoint of an engine, of all its sequences. Mode `ring` until prepared."""

    def __init__(
        self,
        contract: Contract,
        specs: PlannerSpecs,
        binder: Binder,
        caches: Mapping[str, Buffer],
        table: SequenceTable,
        in_use: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """in_use: held by each call, as by every call of the engine."""
        self._contract = contract
        self._binder = binder
        self._caches = caches
        self._table = table
        self._in_use = in_use
        self._ring_rows = state_kinds(specs.compressors)
        raw = contract.layout(CacheKind.RAW)
        raw_room = raw.rows_per_stream - specs.raw_rows.rows_before_step + 1
        rewind = min((spec.rewind for spec in specs.compressors), default=raw_room)
        self._limits = {
            Mode.RING: rewind,
            Mode.DELTA: min(MAX_DELTA_TOKENS, raw_room),
            Mode.SHADOW: raw_room,
            Mode.HOST: raw_room,
        }
        self._edits: dict[int, int] = {}
        self._copies = self._allocate(Mode.RING, rewind)
        self._book = Book(Mode.RING, rewind, self._ring_rows)

    @property
    def mode(self) -> Mode:
        """The mode prepared last."""
        return self._book.mode

    @property
    def max_tokens(self) -> int:
        """Tokens of a sequence that the mode was prepared for."""
        return self._book.max_tokens

    @property
    def is_saved(self) -> bool:
        """Whether a save is live."""
        return self._book.is_saved

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes of the copies, by kind: base and delta, shadow or host; none in mode ring."""
        return self._copies.num_bytes

    @property
    def by_layer(self) -> dict[int, dict[str, int]]:
        """Bytes of the copies of each layer's states, by kind."""
        return self._copies.by_layer

    def limit(self, mode: Mode | str) -> int:
        """The most tokens of a sequence that a mode can be prepared for."""
        return self._limits[_mode(mode)]

    def report(self, mode: Mode | str, max_tokens: int | None = None) -> dict[str, int]:
        """Bytes that `prepare` with these arguments would hold, by kind; allocates nothing.

        ConfigError names the limit.
        """
        wanted, count = self._wanted(mode, max_tokens)
        states = (spec for spec in self._contract.caches if spec.kind in self._ring_rows)
        return copy_bytes(wanted, count, states)

    def prepare(self, mode: Mode | str, max_tokens: int | None = None) -> None:
        """Choose a mode and allocate its memory; `max_tokens` is the mode's limit by default.

        In the mode that is prepared already an equal or smaller request changes nothing and a
        larger one keeps the save. ConfigError names the limit, UsageError a live save of another
        mode, CapacityError memory that cannot be had; then nothing has changed.
        """
        with self._in_use():
            wanted, count = self._wanted(mode, max_tokens)
            if wanted is self.mode:
                if count > self.max_tokens:
                    self._copies.grow(count)
                    self._book.max_tokens = count
                    self._log()
                return
            if self.is_saved:
                raise UsageError(
                    f"a {self.mode.value} save is live and cannot become a {wanted.value} one; "
                    "call discard() first"
                )
            self._copies = self._allocate(wanted, count)
            self._book = Book(wanted, count, self._ring_rows)
            self._log()

    def save(self) -> None:
        """Mark where every sequence stands; the former save is void, also when this one fails."""
        with self._in_use():
            self._book.discard()
            with interrupts_held():
                self._copies.save()
                table = self._table
                self._edits = {seq: table.edits(seq)[0] for seq in table.ids}
                self._book.save(
                    {seq: (table.length(seq), table.written(seq)) for seq in table.ids}
                )

    def accept(self, seq_id: int, count: int) -> Rewound:
        """Keep the first `count` tokens that a sequence was given since the save.

        May be called again with another count, and starts from the save each time. The answer is
        `direct`, or the position to decode again from. RewindError, with all state as it was, where
        nothing is saved, the checkpoint is void, or the sequence cannot stand there.
        """
        with self._in_use():
            record = self._checked(seq_id, count)
            if count == record.standing:
                return Rewound()
            target, written = self._goal(record, count)
            self._check_stand(seq_id, record, target)
            tokens = record.tokens[: target - record.base]
            with nullcontext() if self.mode is Mode.RING else interrupts_held():
                if self.mode is not Mode.RING:
                    self._restore(seq_id, len(tokens))
                self._table.move_to(seq_id, record.base, tokens, written)
                record.standing = len(tokens)
            return Rewound(target if target < record.base + count else None)

    def discard(self) -> None:
        """Forget the save and its records; the memory stays."""
        with self._in_use():
            self._book.discard()

    def release(self) -> None:
        """Free the memory, and with it any save. The mode is `ring` again."""
        with self._in_use():
            self.close()

    def close(self) -> None:
        """Free the memory without asking who else is at work: for the engine's own `close`."""
        self._copies = self._allocate(Mode.RING, self._limits[Mode.RING])
        self._book = Book(Mode.RING, self._limits[Mode.RING], self._ring_rows)

    def note(self, ubatch: UBatch) -> None:
        """Take a step that has run. A recording that fails voids the checkpoint of its sequence."""
        if not self.is_saved:
            return
        positions = ubatch.positions.reshape(-1, ubatch.step).tolist()
        tokens = ubatch.tokens.reshape(-1, ubatch.step).tolist()
        for seq, places, ids in zip(ubatch.streams, positions, tokens, strict=True):
            numbers = self._book.note(seq, places, ids)
            if numbers is None:
                continue
            try:
                self._copies.record(seq, places, numbers)
            except Exception as error:  # the tokens are in all the same
                self._book.void(seq, f"its rows could not be recorded: {error}")

    def _wanted(self, mode: Mode | str, max_tokens: int | None) -> tuple[Mode, int]:
        """A mode and its tokens, by default the mode's limit; ConfigError names the limit."""
        wanted = _mode(mode)
        count = self._limits[wanted] if max_tokens is None else max_tokens
        check_max_tokens(wanted, count, self._limits[wanted])
        return wanted, count

    def _checked(self, seq_id: int, count: int) -> Record:
        if self.is_saved and seq_id in self._edits:
            edits, last = self._table.edits(seq_id)
            if edits != self._edits[seq_id]:
                self._book.void(seq_id, f"the sequence was {last} since the save")
        return self._book.check(seq_id, count)

    def _goal(self, record: Record, count: int) -> tuple[int, int]:
        """Where the sequence stands afterwards, and up to which position its rings are written."""
        target = record.base + count
        if self.mode is Mode.RING:
            return target, record.written
        if self.mode is Mode.DELTA:
            return target, max(record.base_written, target)
        return record.base, record.base_written

    def _check_stand(self, seq_id: int, record: Record, target: int) -> None:
        """RewindError unless the raw rows, and in mode ring the state rows, are still there."""
        ring_written = record.written if self.mode is Mode.RING else None
        if self._table.rows_held(target, record.reached, ring_written):
            return
        remedy = (
            "accept more of them" if self.mode in (Mode.RING, Mode.DELTA) else "save oftener"
        )
        raise RewindError(
            f"sequence {seq_id} cannot stand at {target}: {record.reached - target} positions from "
            f"there on were written, which took rows that it still needs; {remedy}, or export "
            "with a larger --rewind"
        )

    def _restore(self, seq_id: int, count: int) -> None:
        """Move rows back; a device that fails half-way costs the sequence, and says so."""
        try:
            self._copies.restore(seq_id, self._book.kept_rows(seq_id, count))
        except ContractError:
            raise
        except Exception:
            self._table.clear(seq_id)
            raise

    def _allocate(self, mode: Mode, max_tokens: int) -> StateCopies:
        return StateCopies(
            mode, max_tokens, self._ring_rows, self._contract, self._binder, self._caches
        )

    def _log(self) -> None:
        sizes = ", ".join(
            f"{name} {count / _MIB:.2f} MiB" for name, count in self.num_bytes.items()
        )
        _log.info(
            "checkpoint %s for %d tokens: %s", self.mode, self.max_tokens, sizes or "no memory"
        )


def _mode(mode: Mode | str) -> Mode:
    try:
        return Mode(mode)
    except ValueError:
        raise ConfigError(
            f"no checkpoint mode {mode!r}; choose one of {', '.join(Mode)}"
        ) from None
