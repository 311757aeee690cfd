"""The raw plan: rows that take a step's tokens, and rows that each stream reads.

Takes the cell table as it will be once the step's rows are placed, and assumes neither contiguous
nor ordered cells. Knows nothing of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.cells import CellView


@dataclass(frozen=True, kw_only=True, slots=True)
class RawPlan:
    """Logical lists of the raw caches.

    write_idxs: [T] row that takes each token. read_idxs, read_pos: rows read and the positions they
    hold, stream after stream, each stream's in ascending slot order, this step's own rows included.
    read_counts: [S] rows of each stream.
    """

    write_idxs: IntArray
    read_idxs: IntArray
    read_pos: IntArray
    read_counts: IntArray


def plan_raw(
    cells: CellView,
    *,
    write_idxs: IntArray,
    streams: Sequence[int],
    oldest: IntArray | None = None,
    pinned: int = 0,
) -> RawPlan:
    """Plan one step; changes nothing.

    write_idxs: rows reserved for the tokens, which `cells` already names. streams: sequence ids.
    oldest: [S] oldest position that some query of each stream sees; None cuts nothing. pinned:
    first positions that every query sees.
    """
    held = cells.positions
    floor = 0 if oldest is None else np.maximum(oldest, 0)[:, None]
    ids = streams[0] if len(streams) == 1 else None
    members = cells.members[ids : ids + 1] if ids is not None else cells.members[list(streams)]
    seen = members & ((held >= floor) | (held < pinned))  # [S, cells]
    stream_of, slots = seen.nonzero()
    return RawPlan(
        write_idxs=write_idxs,
        read_idxs=slots if cells.rows is None else cells.rows[slots],
        read_pos=held[slots],
        read_counts=np.bincount(stream_of, minlength=len(streams)),
    )
