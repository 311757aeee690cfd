"""The live sequences of an engine: their bookkeeping and their rows, edited together.

Every edit checks all it needs before the first byte moves, and holds interrupts back while rows
move. Locks and open checks are the engine's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cachegraph.models.contract import CacheKind, DType
from cachegraph.models.errors import RewindError, StateFileError, UsageError
from cachegraph.models.manifest import Manifest
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.binding import Binder, Buffer, PlacedBinder, allocate_caches
from cachegraph.runtime.drafter import Drafter
from cachegraph.runtime.hybrid import HybridMemory
from cachegraph.runtime.interrupts import interrupts_held
from cachegraph.runtime.memory import initial_caches
from cachegraph.runtime.opening import OpenGraph
from cachegraph.runtime.rows import copy_rows, zero_rows, zero_stream
from cachegraph.runtime.saved import (
    Description,
    Rows,
    SavedSequence,
    TensorSize,
    identity_of,
    pack,
    packed_size,
    read_state,
    unpack,
    write_state,
)
from cachegraph.runtime.saved_rows import (
    Placed,
    check_draft,
    check_placement,
    check_resume,
    collect,
    collected_sizes,
)
from cachegraph.runtime.sequence_memory import PositionChange, SequenceMemory
from cachegraph.runtime.sequences import SequenceTable

_STATE = "this state"  # what messages call a state that is no file


class SequenceStore:
    """Caches, and what each sequence holds in them.

    caches: buffers by contract name, on the devices of their stages. binder: moves their rows.
    table: the bookkeeping. drafter: what the draft graph holds beside them, where the engine
    drafts.
    """

    def __init__(self, manifest: Manifest, stages: Sequence[OpenGraph]) -> None:
        """Allocates every cache; CapacityError, with nothing kept, where one cannot be had."""
        self._manifest = manifest
        self._contract = manifest.contract
        self.caches: dict[str, Buffer] = {}
        homes: dict[int, Binder] = {}
        for stage in stages:
            own = allocate_caches(stage.binder, stage.contract, initial_caches(stage.contract))
            self.caches |= own
            homes |= {id(buffer): stage.binder for buffer in own.values()}
        binders = {id(stage.binder): stage.binder for stage in stages}
        one = next(iter(binders.values()))
        self.binder: Binder = one if len(binders) == 1 else PlacedBinder(homes)
        self.table = memory_of(manifest)
        self.drafter: Drafter | None = None

    @property
    def num_sequences(self) -> int:
        """How many sequences the caches hold."""
        return self._manifest.capacity.sequences

    def check_id(self, seq_id: int) -> None:
        """UsageError for an id without a slot."""
        if not 0 <= seq_id < self.num_sequences:
            raise UsageError(
                f"no sequence {seq_id}; this bundle holds 0 to {self.num_sequences - 1}"
            )

    def close(self) -> None:
        """Free every cache and what the drafter holds."""
        self.caches.clear()
        if self.drafter is not None:
            self.drafter.close()

    def clear(self, seq_id: int, *, data: bool = False) -> None:
        """Forget a sequence; with `data` zero its rows too."""
        self.check_id(seq_id)
        own = self.table.own_rows(seq_id)
        with interrupts_held():
            self.table.clear(seq_id)
            if data:
                zero_stream(self.binder, self._contract, self.caches, seq_id)
                for kind, rows in own.items():
                    zero_rows(self.binder, self._contract, self.caches, kind, rows)
                if self.drafter is not None:
                    self.drafter.zero(seq_id)

    def reset(self, seq_id: int) -> None:
        """As of `Engine.reset`."""
        self.check_id(seq_id)
        with interrupts_held():
            self.table.clear(seq_id, "reset")
            zero_stream(self.binder, self._contract, self.caches, seq_id)

    def remove(self, seq_id: int, first: int, end: int) -> None:
        """As of `Engine.remove`."""
        which = range(self.num_sequences) if seq_id == -1 else [seq_id]
        cuts = {seq: self._cut_at(seq, first, end) for seq in which}
        for seq, position in cuts.items():
            self.table.check_cut(seq, position)
        for seq, position in cuts.items():
            self.table.cut(seq, position)

    def rewind(self, seq_id: int, length: int) -> None:
        """As of `Engine.rewind`."""
        self.check_id(seq_id)
        if not 0 <= length <= self.table.length(seq_id):
            raise RewindError(
                f"sequence {seq_id} holds {self.table.length(seq_id)} tokens; it cannot be "
                f"rewound to {length}"
            )
        self.table.check_cut(seq_id, length)
        self.table.cut(seq_id, length)

    def move(self, seq_id: int, first: int, end: int, change: PositionChange) -> None:
        """As of `Engine.shift` and `Engine.divide`."""
        self.check_id(seq_id)
        moved = self.table.moved(seq_id, first, end, change)
        rotation = self._manifest.planners.keys
        caches = [c for c in self._contract.caches if c.kind is CacheKind.KEYS]
        if any(spec.dtype is not DType.FLOAT32 for spec in caches):
            raise UsageError(
                "keys of this bundle are not held as f32, so that turning them would round them "
                "again; export with --cache f32"
            )
        with interrupts_held():
            try:
                for spec in caches:
                    assert rotation is not None  # a family with keys says how they are rotated
                    rows = self.binder.read_rows(self.caches[spec.name], moved.rows)
                    turned = rotation.turned(rows, moved.steps)
                    self.binder.write_rows(self.caches[spec.name], moved.rows, turned)
            except BaseException:
                self.table.clear(seq_id)
                raise
            self.table.move(moved)

    def copy(self, source: int, target: int) -> int:
        """As of `Engine.copy`."""
        self.check_id(source)
        self.check_id(target)
        if source == target:
            return 0
        moves = self.table.live_rows(source, target)
        with interrupts_held():
            self.table.clear(target)
            moved = copy_rows(self.binder, self._contract, self.caches, moves)
            self.table.copied(source, target)
            if self.drafter is not None:
                moved += self.drafter.copy(source, target)
        return moved

    def save(self, path: Path, seq_ids: Sequence[int] | None) -> int:
        """As of `Engine.save`."""
        for seq in seq_ids or ():
            self.check_id(seq)
        held = [seq for seq in range(self.num_sequences) if self.table.length(seq)]
        data = self._packed(held if seq_ids is None else dict.fromkeys(seq_ids))
        write_state(path, data)
        return len(data)

    def state(self, seq_id: int, *, partial: bool) -> bytes:
        """As of `Engine.state`."""
        self.check_id(seq_id)
        if not partial:
            return self._packed([seq_id])
        saved, tensors = collect(
            seq_id, self.table, self.binder, self._contract, self.caches, partial=True
        )
        return pack(identity_of(self._manifest), [saved], tensors)

    def state_size(self, seq_id: int, *, partial: bool) -> int:
        """As of `Engine.state_size`."""
        self.check_id(seq_id)
        saved, sizes = collected_sizes(seq_id, self.table, self._contract, partial=partial)
        if self.drafter is not None and not partial:
            draft, tensors = self.drafter.stored(seq_id)
            saved = saved.model_copy(update={"draft": draft})
            sizes |= {name: TensorSize.of(t.dtype, t.shape) for name, t in tensors.items()}
        return packed_size(identity_of(self._manifest), [saved], sizes)

    def set_state(self, seq_id: int, data: bytes) -> int:
        """As of `Engine.set_state`."""
        self.check_id(seq_id)
        description, tensors = unpack(_STATE, data, identity_of(self._manifest))
        if len(description.sequences) != 1:
            raise StateFileError(
                f"{_STATE} holds {len(description.sequences)} sequences; restore it from a file"
            )
        (saved,) = description.sequences
        if saved.text is None:
            self._restore(_STATE, description, tensors, {saved.seq_id: seq_id})
        else:
            self._resume(saved, tensors, seq_id)
        return saved.length

    def _packed(self, seq_ids: Iterable[int]) -> bytes:
        """Everything that some sequences carry."""
        saved: list[SavedSequence] = []
        tensors: dict[str, Rows] = {}
        for seq in seq_ids:
            part, rows = collect(seq, self.table, self.binder, self._contract, self.caches)
            if self.drafter is not None:
                draft, more = self.drafter.stored(seq)
                part, rows = part.model_copy(update={"draft": draft}), rows | more
            saved.append(part)
            tensors |= rows
        return pack(identity_of(self._manifest), saved, tensors)

    def restore(self, path: Path, targets: Mapping[int, int] | None) -> dict[int, int]:
        """As of `Engine.restore`."""
        description, tensors = read_state(path, identity_of(self._manifest))
        if targets is None:
            targets = {saved.seq_id: saved.seq_id for saved in description.sequences}
        for slot in targets.values():
            self.check_id(slot)
        if len(set(targets.values())) < len(targets):
            raise UsageError(f"two saved sequences want one slot: {dict(targets)}")
        self._restore(str(path), description, tensors, targets)
        return dict(targets)

    def _restore(
        self,
        where: str,
        description: Description,
        tensors: Mapping[str, Rows],
        targets: Mapping[int, int],
    ) -> None:
        """Put whole sequences into their slots, all checked before the first byte moves."""
        placed = check_placement(
            where,
            description,
            tensors,
            targets,
            self.table,
            self._contract,
            self._manifest.capacity.context,
        )
        drafts = {saved.seq_id: saved for saved in description.sequences}
        if self.drafter is not None:
            for seq in targets:
                check_draft(where, drafts[seq], tensors, self.drafter.entry)
        with interrupts_held():
            for one in placed:
                self._put(one)
            if self.drafter is not None:
                for seq, slot in targets.items():
                    self.drafter.restore(slot, drafts[seq].draft, tensors, seq)

    def _resume(self, saved: SavedSequence, tensors: Mapping[str, Rows], seq_id: int) -> None:
        """Set a partial state; a device that fails half-way leaves the sequence empty."""
        checked = check_resume(_STATE, saved, tensors, seq_id, self.table, self._contract)
        with interrupts_held():
            self.table.resumed(seq_id, checked.rows)
            self._write(seq_id, checked.rows.rows, checked.values)

    def _put(self, placed: Placed) -> None:
        """Replace what a slot holds; a device that fails half-way leaves the slot empty."""
        self.table.restored(placed.slot, placed.rows, placed.tokens, placed.places)
        rows = self.table.stored(placed.slot).rows
        self._write(placed.slot, rows, placed.values)

    def _write(
        self, seq_id: int, rows: Mapping[CacheKind, IntArray], values: Mapping[str, Rows]
    ) -> None:
        """Write rows of a sequence, which is dropped where that fails."""
        try:
            for spec in self._contract.caches:
                if spec.kind in rows:
                    self.binder.write_rows(
                        self.caches[spec.name], rows[spec.kind], values[spec.name]
                    )
        except BaseException:
            self.table.clear(seq_id)
            raise

    def _cut_at(self, seq_id: int, first: int, end: int) -> int:
        """The length a sequence has after `remove`; RewindError for a range in the middle."""
        self.check_id(seq_id)
        length = self.table.length(seq_id)
        start = self.table.count_before(seq_id, max(0, first))
        stop = length if end < 0 else self.table.count_before(seq_id, end)
        if start >= stop:
            return length
        if stop < length:
            raise RewindError(
                f"sequence {seq_id}: tokens {start} to {stop - 1} cannot be removed while "
                f"{stop} to {length - 1} stay: what they left in rows and states depends on those "
                f"before them; remove from {start} to the end and decode the rest again"
            )
        return start


def memory_of(manifest: Manifest) -> SequenceMemory:
    """The bookkeeping that a bundle's planners need."""
    if manifest.planners.raw is not None:
        return SequenceTable(manifest.contract, manifest.planners)
    return HybridMemory(manifest.contract, manifest.planners, manifest.capacity)
