"""Moving and erasing rows of bound caches. Row numbers come from `sequences.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from cachegraph.models.contract import MAY_SHARE, CacheKind, Contract
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.binding import Binder, Buffer
from cachegraph.runtime.sequence_memory import RowMove


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
    """Zero the whole block of a stream in every cache whose rows no sequences may share."""
    for spec in contract.caches:
        if spec.kind not in MAY_SHARE:
            start = spec.layout.base(stream)
            binder.zero_rows(caches[spec.name], start, start + spec.layout.rows_per_stream)


def zero_rows(
    binder: Binder,
    contract: Contract,
    caches: Mapping[str, Buffer],
    kind: CacheKind,
    rows: IntArray,
) -> None:
    """Zero rows, which are ascending, in every cache of a kind."""
    if not rows.size:
        return
    spans = np.split(rows, (np.diff(rows) != 1).nonzero()[0] + 1)
    for spec in contract.caches:
        if spec.kind is kind:
            for span in spans:
                binder.zero_rows(caches[spec.name], int(span[0]), int(span[-1]) + 1)
