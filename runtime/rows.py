"""Moving and erasing rows of bound caches. Row numbers come from `sequences.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cachegraph.models.contract import Contract
from cachegraph.runtime.binding import Binder, Buffer
from cachegraph.runtime.sequences import RowMove


def copy_rows(
    binder: Binder,
    contract: Contract,
    caches: Mapping[str, Buffer],
    moves: Iterable[RowMove],
) -> int:
    """Copy rows inside every cache of each move's kind; returns the bytes moved."""
    moved = 0
    for move in moves:
        for spec in contract.caches:
            if spec.kind is move.kind and move.source.size:
                binder.copy_rows(caches[spec.name], move.source, move.target)
                moved += move.source.size * spec.width * spec.dtype.itemsize
    return moved


def zero_stream(
    binder: Binder, contract: Contract, caches: Mapping[str, Buffer], stream: int
) -> None:
    """Zero the whole block of a stream in every cache."""
    for spec in contract.caches:
        start = spec.layout.base(stream)
        binder.zero_rows(caches[spec.name], start, start + spec.layout.rows_per_stream)
