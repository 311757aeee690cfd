"""Splitting a batch into ubatches: equal tokens for each stream, stream-major.

Owns the choice of step sizes. A sequence is cut as if it were alone, so that its neighbours never
move its chunk edges; chunks of equal size then share a call. Knows nothing of rows or caches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from cachegraph.models.buckets import BucketLadder
from cachegraph.runtime.batch import Batch, BoolArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class UBatch:
    """The tokens of one graph call, stream-major: token i of stream s is entry s * step + i.

    tokens, positions, source, wants_logits: [S * P]. streams: the S distinct sequence ids.
    step: P, real and unpadded. source: row of the batch that each entry came from.
    places: [S * P, 3], all positions of a token where it has three; `positions` is the first.
    """

    tokens: IntArray
    positions: IntArray
    streams: tuple[int, ...]
    step: int
    source: IntArray
    wants_logits: BoolArray
    places: IntArray | None = None


def split_batch(batch: Batch, ladder: BucketLadder) -> tuple[UBatch, ...]:
    """Ubatches that hold every token once, each sequence in its own order.

    The batch has passed `check_batch`: one sequence for each token. The sequence with most tokens
    left leads; others whose next chunk has the same size join it, up to the ladder's streams.
    """
    chunks = {
        seq: deque(_chunks(rows, int(batch.positions[rows[0]]), ladder.steps))
        for seq, rows in batch.rows_of_sequences().items()
    }
    parts = []
    while chunks:
        leader = max(chunks, key=lambda seq: sum(part.size for part in chunks[seq]))
        step = chunks[leader][0].size
        joining = [seq for seq in chunks if seq != leader and chunks[seq][0].size == step]
        streams = sorted([leader, *joining[: ladder.streams[-1] - 1]])
        parts.append(_ubatch(batch, streams, [chunks[seq].popleft() for seq in streams]))
        chunks = {seq: left for seq, left in chunks.items() if left}
    return tuple(parts)


def step_size(count: int, steps: tuple[int, ...]) -> int:
    """How many of `count` tokens the next step takes.

    All of them where the smallest rung that holds them is at least half full; else the largest
    rung that they fill, so that padding never exceeds half of a call.
    """
    holding = next((rung for rung in steps if rung >= count), None)
    if holding is not None and 2 * count >= holding:
        return count
    return max((rung for rung in steps if rung <= count), default=count)


def _chunks(rows: IntArray, start: int, steps: tuple[int, ...]) -> list[IntArray]:
    """Cut one sequence's rows.

    A run longer than the longest step has edges at multiples of that step, counted from position 0,
    wherever the run starts.
    """
    longest = steps[-1]
    parts = []
    aligned = rows.size > longest
    done = 0
    while done < rows.size:
        left = rows.size - done
        to_edge = longest - (start + done) % longest
        take = step_size(min(left, to_edge) if aligned else left, steps)
        parts.append(rows[done : done + take])
        done += take
    return parts


def _ubatch(batch: Batch, streams: list[int], parts: list[IntArray]) -> UBatch:
    source = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return UBatch(
        tokens=batch.tokens[source],
        positions=batch.positions[source],
        streams=tuple(streams),
        step=parts[0].size,
        source=source,
        wants_logits=batch.wants_logits[source],
        places=None if batch.places is None else batch.places[source],
    )
