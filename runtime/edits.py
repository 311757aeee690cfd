"""The sequences of an engine as a caller sees them: what they hold, and every edit of them.

`Engine` adds decoding. One call at a time: concurrent use raises UsageError.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cachegraph.models.errors import UsageError
from cachegraph.models.manifest import Manifest
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.bundle import verify
from cachegraph.runtime.store import SequenceStore


class SequenceEdits:
    """What sequences hold, and how they are changed other than by decoding."""

    def __init__(self, folder: Path, manifest: Manifest, store: SequenceStore) -> None:
        self.folder = folder
        self.manifest = manifest
        self._store = store
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_verified = False

    @property
    def num_sequences(self) -> int:
        """How many sequences the caches hold."""
        return self.manifest.capacity.sequences

    def length(self, seq_id: int) -> int:
        """Tokens that a sequence holds."""
        self._check_open()
        self._store.check_id(seq_id)
        return self._store.table.length(seq_id)

    def following(self, seq_id: int) -> int:
        """The position of the token that follows a sequence: its length, unless it has images."""
        self._check_open()
        self._store.check_id(seq_id)
        return self._store.table.following(seq_id)

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The token ids that a sequence holds, by position."""
        self._check_open()
        self._store.check_id(seq_id)
        return self._store.table.tokens(seq_id)

    def positions(self, seq_id: int) -> range | IntArray:
        """The positions that a sequence holds; int64 [n, 3] where a token has three."""
        length = self.length(seq_id)
        places = self._store.table.places(seq_id)
        return range(length) if places is None else places

    def reachable(self, seq_id: int) -> tuple[range, ...]:
        """The positions that a sequence can be cut to, as ascending ranges."""
        self._check_open()
        self._store.check_id(seq_id)
        return self._store.table.reachable(seq_id)

    def clear(self, seq_id: int | None = None, *, data: bool = False) -> None:
        """Forget a sequence, or all of them (None or -1).

        Its rows need no erasing, since no plan reads them; `data` zeroes them all the same.
        """
        with self._in_use():
            for seq in range(self.num_sequences) if seq_id in (None, -1) else [seq_id]:
                self._store.clear(seq, data=data)

    def reset(self, seq_id: int) -> None:
        """Forget a sequence and zero its block in every compressed, indexer and state cache.

        Its raw rows become free; no byte of another sequence changes.
        """
        with self._in_use():
            self._store.reset(seq_id)

    def remove(self, seq_id: int, first: int, end: int = -1) -> None:
        """Take tokens back from the end of a sequence: positions `first` to `end` - 1.

        A negative `first` is the start, a negative `end` the end; seq_id -1 means every sequence.
        An empty range changes nothing. RewindError, with nothing changed, for a range that does not
        reach the end (what follows it depends on absolute positions), or where the sequence cannot
        stand at `first`; the reachable positions are named. Copies nothing.
        """
        with self._in_use():
            self._store.remove(seq_id, first, end)

    def rewind(self, seq_id: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence, wherever their positions are.

        RewindError, with nothing changed, where the sequence cannot stand there; the reachable
        lengths are named. Copies nothing.
        """
        with self._in_use():
            self._store.rewind(seq_id, length)

    def copy(self, source: int, target: int) -> int:
        """Make `target` hold what `source` holds; returns the bytes moved.

        What `target` held is replaced. Only live rows are copied. Onto itself it does nothing.
        """
        with self._in_use():
            return self._store.copy(source, target)

    def keep(self, seq_id: int) -> None:
        """Forget every sequence but one."""
        with self._in_use():
            self._store.check_id(seq_id)
            for seq in set(range(self.num_sequences)) - {seq_id}:
                self._store.clear(seq)
            self._store.table.kept(seq_id)

    def save(self, path: str | Path, seq_ids: Sequence[int] | None = None) -> int:
        """Save sequences (all that hold tokens by default) to one file; returns its bytes.

        Atomic: an error leaves what was at `path`.
        """
        with self._in_use():
            return self._store.save(Path(path), seq_ids)

    def restore(
        self, path: str | Path, targets: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Restore saved sequences; returns saved id -> slot.

        targets: saved id -> slot; by default every saved sequence into the slot of its id. What a
        slot held is replaced. StateFileError or CapacityError leaves every live row as it was.
        The first restore hashes the weights file: ContractError where it was changed.
        """
        with self._in_use():
            self._verify_once()
            return self._store.restore(Path(path), targets)

    def state(self, seq_id: int, *, partial: bool = False) -> bytes:
        """What a sequence carries, as `save` writes it.

        partial: only what taking tokens back cannot bring back (recurrent states and convolution
        histories with their snapshots, or the state rings): small, and of use as long as the
        sequence still holds the tokens up to here.
        """
        with self._in_use():
            return self._store.state(seq_id, partial=partial)

    def state_size(self, seq_id: int, *, partial: bool = False) -> int:
        """Bytes that `state` would give."""
        with self._in_use():
            return self._store.state_size(seq_id, partial=partial)

    def set_state(self, seq_id: int, data: bytes) -> int:
        """Make a sequence stand where a state was taken; returns its tokens.

        A whole state replaces what the sequence held. A partial one takes back the tokens since;
        StateFileError where the sequence holds other tokens now, or lost rows that it needs. An
        error leaves everything as it was.
        """
        with self._in_use():
            self._verify_once()
            return self._store.set_state(seq_id, data)

    def _verify_once(self) -> None:
        """Hash the weights file; ContractError where it was changed."""
        if not self._is_verified:
            verify(self.folder)
            self._is_verified = True

    def shift(self, seq_id: int, first: int, end: int, delta: int) -> None:
        """Move tokens at positions `first` to `end` - 1 by `delta`; a negative `end` is the end.

        Their keys are turned; recurrent states stay. UsageError, with nothing changed, for a family
        whose rows depend on positions, a sequence that holds an image or shares rows, keys that are
        not f32, and where the order would change.
        """
        with self._in_use():
            self._store.move(seq_id, first, end, lambda positions: positions + delta)

    def divide(self, seq_id: int, first: int, end: int, divisor: int) -> None:
        """Divide the positions `first` to `end` - 1, rounding down; otherwise as `shift`."""
        if divisor < 1:
            raise UsageError(f"positions cannot be divided by {divisor}; give 1 or more")
        with self._in_use():
            self._store.move(seq_id, first, end, lambda positions: positions // divisor)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("this engine is closed; load the bundle again")

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        self._check_open()
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                "this engine is in use by another thread; use one engine a thread"
            )
        try:
            yield
        finally:
            self._lock.release()
