"""Between a state file and live caches: how a sequence is stored, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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
) -> tuple[SavedSequence, dict[str, Rows]]:
    """Copies of everything that one sequence carries."""
    stored = table.stored(seq_id)
    tensors: dict[str, Rows] = {tokens_name(seq_id): np.array(table.tokens(seq_id), np.int64)}
    if (places := table.places(seq_id)) is not None:
        tensors[places_name(seq_id)] = places
    for spec in contract.caches:
        if spec.kind not in stored.rows:
            continue
        values = binder.read_rows(caches[spec.name], stored.rows[spec.kind])
        tensors[rows_name(seq_id, spec.name)] = values
    saved = SavedSequence(
        seq_id=seq_id,
        length=stored.length,
        raw_first=stored.raw_first,
        state_first=dict(stored.state_first),
        depth=stored.depth,
    )
    return saved, tensors


def check_placement(
    path: Path,
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
        if seq_id not in by_id:
            raise StateFileError(
                f"{path} holds sequences {sorted(by_id)}, not {seq_id}; choose one of them"
            )
        saved = by_id[seq_id]
        if saved.length > context:
            raise CapacityError(
                f"{path}: sequence {seq_id} has {saved.length} tokens, the context holds "
                f"{context}; export with a larger --context"
            )
        tokens = _tensor(path, tensors, tokens_name(seq_id))
        if tokens.shape != (saved.length,):
            raise StateFileError(f"{path}: {tokens.size} token ids, wanted {saved.length}")
        try:
            rows = table.slots_for(slot, saved)
        except StateFileError as error:
            raise StateFileError(
                f"{path}: sequence {seq_id}: {error}; save it again"
            ) from None
        values = {
            spec.name: _newest(
                path,
                _tensor(path, tensors, rows_name(seq_id, spec.name)),
                (rows.rows[spec.kind].size, spec.width),
                rows.raw_pinned if spec.kind is CacheKind.RAW else 0,
            )
            for spec in contract.caches
            if spec.kind in rows.rows
        }
        places = _places(path, tensors, saved) if table.has_places else None
        placed.append(Placed(slot, rows, values, tokens.tolist(), places))
    return placed


def check_draft(
    path: Path, saved: SavedSequence, tensors: Mapping[str, Rows], entry: DraftEntry
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
            f"{path}: sequence {saved.seq_id}: its draft part {draft} does not fit {saved.length} "
            "tokens; save it again"
        )
    if draft.raw_first == 0 < draft.paired:
        raise StateFileError(
            f"{path}: sequence {saved.seq_id} has a draft row of its first token, which has no "
            "pair; restore it without drafting and save it again"
        )
    widths = {CARRIED: entry.hidden.width} | {c.name: c.width for c in entry.contract.caches}
    for name, width in widths.items():
        count = draft.end - draft.first if name == CARRIED else draft.paired - draft.raw_first
        shape = _tensor(path, tensors, rows_name(saved.seq_id, name)).shape
        if shape != (count, width):
            raise StateFileError(
                f"{path}: {rows_name(saved.seq_id, name)} has shape {shape}, wanted "
                f"{(count, width)}; save the sequence again"
            )


def _places(path: Path, tensors: Mapping[str, Rows], saved: SavedSequence) -> IntArray:
    """Positions of a saved sequence; StateFileError where they cannot have been."""
    places: IntArray = _tensor(path, tensors, places_name(saved.seq_id))
    if places.shape != (saved.length, 3) or places.dtype != np.int64:
        raise StateFileError(
            f"{path}: positions of shape {places.shape}, wanted {(saved.length, 3)} int64"
        )
    if saved.length and (places.min() < 0 or (np.diff(places[:, 0]) < 0).any()):
        raise StateFileError(
            f"{path}: positions of sequence {saved.seq_id} fall; save it again"
        )
    return places


def _newest(path: Path, stored: Rows, shape: tuple[int, int], pinned: int) -> Rows:
    """The pinned and the last rows of a stored tensor: what an engine with less room keeps."""
    if stored.ndim != 2 or stored.shape[1] != shape[1] or len(stored) < shape[0]:
        raise StateFileError(f"{path}: rows of shape {stored.shape}, wanted {shape} at least")
    newest = stored[len(stored) - shape[0] + pinned :]
    return np.concatenate((stored[:pinned], newest)) if pinned else newest


def _tensor(path: Path, tensors: Mapping[str, Rows], name: str) -> Rows:
    if name not in tensors:
        raise StateFileError(f"{path}: tensor {name!r} is missing; save the sequence again")
    return tensors[name]
