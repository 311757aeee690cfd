"""Between a state file and live caches: how a sequence is stored, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cachegraph.models.contract import CARRIED, CacheKind, Contract
from cachegraph.models.errors import CapacityError, StateFileError
from cachegraph.models.manifest import DraftEntry
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.binding import Binder, Buffer
from cachegraph.runtime.saved import (
    Description,
    Rows,
    SavedSequence,
    TensorSize,
    places_name,
    rows_name,
    tokens_name,
)
from cachegraph.runtime.sequence_memory import SequenceMemory, StoredRows


class Placed(NamedTuple):
    """A checked sequence: its slot, its rows there, and their values by cache name."""

    slot: int
    rows: StoredRows
    values: dict[str, Rows]
    tokens: list[int]
    places: IntArray | None


def collect(
    seq_id: int,
    table: SequenceMemory,
    binder: Binder,
    contract: Contract,
    caches: Mapping[str, Buffer],
    *,
    partial: bool = False,
) -> tuple[SavedSequence, dict[str, Rows]]:
    """Copies of everything that one sequence carries; partial: of what cannot be rewound alone."""
    saved, rows = _described(seq_id, table, partial)
    tensors: dict[str, Rows] = {}
    if not partial:
        tensors[tokens_name(seq_id)] = np.array(table.tokens(seq_id), np.int64)
        if (places := table.places(seq_id)) is not None:
            tensors[places_name(seq_id)] = places
    for spec in contract.caches:
        if spec.kind in rows:
            values = binder.read_rows(caches[spec.name], rows[spec.kind])
            tensors[rows_name(seq_id, spec.name)] = values
    return saved, tensors


def collected_sizes(
    seq_id: int, table: SequenceMemory, contract: Contract, *, partial: bool = False
) -> tuple[SavedSequence, dict[str, TensorSize]]:
    """As `collect`, but types and shapes instead of copies."""
    saved, rows = _described(seq_id, table, partial)
    sizes: dict[str, TensorSize] = {}
    if not partial:
        sizes[tokens_name(seq_id)] = TensorSize.of(np.dtype(np.int64), (saved.length,))
        if table.has_places:
            sizes[places_name(seq_id)] = TensorSize.of(np.dtype(np.int64), (saved.length, 3))
    for spec in contract.caches:
        if spec.kind in rows:
            shape = rows[spec.kind].size, spec.width
            sizes[rows_name(seq_id, spec.name)] = TensorSize.of(spec.dtype.numpy, shape)
    return saved, sizes


def _described(
    seq_id: int, table: SequenceMemory, partial: bool
) -> tuple[SavedSequence, Mapping[CacheKind, IntArray]]:
    """What a save says of a sequence, and the rows that it holds by cache kind."""
    stored = table.stored(seq_id)
    rows = stored.rows
    if partial:
        rows = {kind: places for kind, places in rows.items() if kind.is_state}
    saved = SavedSequence(
        seq_id=seq_id,
        length=stored.length,
        raw_first=stored.raw_first,
        state_first=dict(stored.state_first),
        depth=stored.depth,
        text=table.digest(seq_id, stored.length) if partial else None,
    )
    return saved, rows


class Resumed(NamedTuple):
    """A checked partial state: its rows in the sequence, and their values by cache name."""

    rows: StoredRows
    values: dict[str, Rows]


def check_resume(
    where: str,
    saved: SavedSequence,
    tensors: Mapping[str, Rows],
    seq_id: int,
    table: SequenceMemory,
    contract: Contract,
) -> Resumed:
    """Check a partial state against what a sequence holds; nothing is written.

    StateFileError where the sequence no longer holds the rows that the states belong to.
    """
    if saved.length > table.length(seq_id) or saved.text != table.digest(seq_id, saved.length):
        raise StateFileError(
            f"{where}: a partial state after {saved.length} tokens; sequence {seq_id} does not "
            "hold these tokens any more; restore a whole state"
        )
    try:
        rows = table.slots_to_resume(seq_id, saved)
    except StateFileError as error:
        raise StateFileError(f"{where}: sequence {seq_id}: {error}") from None
    values = {
        spec.name: _newest(
            where,
            _tensor(where, tensors, rows_name(saved.seq_id, spec.name)),
            (rows.rows[spec.kind].size, spec.width),
            0,
        )
        for spec in contract.caches
        if spec.kind in rows.rows
    }
    return Resumed(rows, values)


def check_placement(
    where: str,
    description: Description,
    tensors: Mapping[str, Rows],
    targets: Mapping[int, int],
    table: SequenceMemory,
    contract: Contract,
    context: int,
) -> list[Placed]:
    """Check every wanted sequence in full and say where its rows go; nothing is written.

    targets: saved sequence id -> slot. StateFileError or CapacityError names what does not fit.
    """
    by_id = {saved.seq_id: saved for saved in description.sequences}
    placed = []
    for seq_id, slot in targets.items():
        if seq_id in by_id and by_id[seq_id].text is not None:
            raise StateFileError(
                f"{where} is a partial state; set it with set_state on the sequence it was taken of"
            )
        if seq_id not in by_id:
            raise StateFileError(
                f"{where} holds sequences {sorted(by_id)}, not {seq_id}; choose one of them"
            )
        saved = by_id[seq_id]
        if saved.length > context:
            raise CapacityError(
                f"{where}: sequence {seq_id} has {saved.length} tokens, the context holds "
                f"{context}; export with a larger --context"
            )
        tokens = _tensor(where, tensors, tokens_name(seq_id))
        if tokens.shape != (saved.length,):
            raise StateFileError(f"{where}: {tokens.size} token ids, wanted {saved.length}")
        try:
            rows = table.slots_for(slot, saved)
        except StateFileError as error:
            raise StateFileError(
                f"{where}: sequence {seq_id}: {error}; save it again"
            ) from None
        values = {
            spec.name: _newest(
                where,
                _tensor(where, tensors, rows_name(seq_id, spec.name)),
                (rows.rows[spec.kind].size, spec.width),
                rows.raw_pinned if spec.kind is CacheKind.RAW else 0,
            )
            for spec in contract.caches
            if spec.kind in rows.rows
        }
        places = _places(where, tensors, saved) if table.has_places else None
        placed.append(Placed(slot, rows, values, tokens.tolist(), places))
    return placed


def check_draft(
    where: str, saved: SavedSequence, tensors: Mapping[str, Rows], entry: DraftEntry
) -> None:
    """StateFileError unless the draft part of a saved sequence is whole and agrees with it."""
    draft = saved.draft
    if draft is None:
        return
    if not (
        draft.first <= draft.end == saved.length
        and draft.raw_first <= draft.paired <= draft.end
    ):
        raise StateFileError(
            f"{where}: sequence {saved.seq_id}: its draft part {draft} does not fit {saved.length} "
            "tokens; save it again"
        )
    if draft.raw_first == 0 < draft.paired:
        raise StateFileError(
            f"{where}: sequence {saved.seq_id} has a draft row of its first token, which has no "
            "pair; restore it without drafting and save it again"
        )
    widths = {CARRIED: entry.hidden.width} | {c.name: c.width for c in entry.contract.caches}
    for name, width in widths.items():
        count = draft.end - draft.first if name == CARRIED else draft.paired - draft.raw_first
        shape = _tensor(where, tensors, rows_name(saved.seq_id, name)).shape
        if shape != (count, width):
            raise StateFileError(
                f"{where}: {rows_name(saved.seq_id, name)} has shape {shape}, wanted "
                f"{(count, width)}; save the sequence again"
            )


def _places(where: str, tensors: Mapping[str, Rows], saved: SavedSequence) -> IntArray:
    """Positions of a saved sequence; StateFileError where they cannot have been."""
    places: IntArray = _tensor(where, tensors, places_name(saved.seq_id))
    if places.shape != (saved.length, 3) or places.dtype != np.int64:
        raise StateFileError(
            f"{where}: positions of shape {places.shape}, wanted {(saved.length, 3)} int64"
        )
    if saved.length and (places.min() < 0 or (np.diff(places[:, 0]) < 0).any()):
        raise StateFileError(
            f"{where}: positions of sequence {saved.seq_id} fall; save it again"
        )
    return places


def _newest(where: str, stored: Rows, shape: tuple[int, int], pinned: int) -> Rows:
    """The pinned and the last rows of a stored tensor: what an engine with less room keeps."""
    if stored.ndim != 2 or stored.shape[1] != shape[1] or len(stored) < shape[0]:
        raise StateFileError(f"{where}: rows of shape {stored.shape}, wanted {shape} at least")
    newest = stored[len(stored) - shape[0] + pinned :]
    return np.concatenate((stored[:pinned], newest)) if pinned else newest


def _tensor(where: str, tensors: Mapping[str, Rows], name: str) -> Rows:
    if name not in tensors:
        raise StateFileError(f"{where}: tensor {name!r} is missing; save the sequence again")
    return tensors[name]
