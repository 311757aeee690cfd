"""The plan of hashed n-grams: table rows of every token, from its sequence's own token history.

Order k hashes a token with the k - 1 before it; an end token cuts what lies before it off, for the
tokens after it. Pure; the caller holds the histories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cachegraph.models.ngram_spec import NgramSpec
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.planners.checks import in_range, same

NAME = "ngram"


def plan_ngram(
    spec: NgramSpec,
    *,
    tokens: IntArray,
    streams: Sequence[int],
    histories: Mapping[int, Sequence[int] | IntArray],
) -> IntArray:
    """Table rows [T, heads] of the tokens of one step; changes nothing.

    tokens: [T], stream-major, equally many for each of the streams. histories: the tokens that a
    sequence holds before the step, in order, its last n - 1 at least; none where it is not named.
    """
    step = tokens.size // len(streams)
    rows = [
        _hashed(spec, tokens[at * step : (at + 1) * step], histories.get(seq, ()))
        for at, seq in enumerate(streams)
    ]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _hashed(spec: NgramSpec, tokens: IntArray, history: Sequence[int] | IntArray) -> IntArray:
    """Rows of the tokens of one sequence, [P, heads]."""
    reach, count = spec.history, tokens.size
    before = np.full(reach, spec.end, np.int64)
    held = np.asarray(history[-reach:], np.int64)
    before[reach - held.size :] = held
    text = np.concatenate((before, tokens))
    primes, offsets = np.array(spec.primes), np.array(spec.offsets)
    heads = spec.heads_per_order
    rows = np.empty((count, primes.size), np.int64)
    mixed = tokens * spec.multipliers[0]
    is_cut = np.zeros(count, np.bool_)
    for back in range(1, reach + 1):
        earlier = text[reach - back : reach - back + count]
        is_cut |= earlier == spec.end
        mixed = mixed ^ np.where(is_cut, spec.end, earlier) * spec.multipliers[back]
        mine = slice((back - 1) * heads, back * heads)
        rows[:, mine] = mixed[:, None] % primes[mine] + offsets[mine]
    return rows


def validate_ngram(spec: NgramSpec, rows: IntArray, *, num_tokens: int) -> None:
    """PlanError unless there is a row of the table for every head of every token."""
    same(NAME, "ids", rows.size, num_tokens * len(spec.primes))
    in_range(NAME, "ids", rows.ravel(), spec.table_rows)
