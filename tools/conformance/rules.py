"""Where the originals are wrong, and what we answer instead.

Each rule has the number that the record's notes give to the fault, and a predicate on a scenario's
input that names the recorded fields it covers. Nothing else may differ. tests/conformance has a
test of each right answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cachegraph.tools.conformance.helpers import (
    has_coupled,
    seq_ids_valid,
    shape,
    stream_seq_ids,
)
from cachegraph.tools.conformance.ours import PAD, history, reserve_blocks
from cachegraph.tools.conformance.scenario import CompressorCase, Scenario

LARGEST_POSITION = 2**31 - 1
Fields = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One deviation. `covers` names fields (or prefixes of them); none where it does not apply."""

    number: int
    why: str
    ours: str
    covers: Callable[[Scenario], Fields]


def rules_for(scenario: Scenario) -> list[tuple[Rule, Fields]]:
    """The rules that apply to a scenario and the fields that each covers."""
    found = [(rule, rule.covers(scenario)) for rule in RULES]
    return [(rule, fields) for rule, fields in found if fields]


def _neighbours(s: Scenario) -> Fields:
    inside = [seq for seq in stream_seq_ids(s) if 0 <= seq < s.num_streams]
    gaps = bool(inside) and max(inside) - min(inside) + 1 != len(stream_seq_ids(s))
    return ("comp_sinfo_errors",) if s.num_streams > 1 and gaps else ()


def _unequal(s: Scenario) -> Fields:
    streams = stream_seq_ids(s)
    counts = {sum(seq in ids for ids in s.ids) for seq in streams}
    return ("raw",) if len(streams) > 1 and len(counts) > 1 else ()


def _coupled(s: Scenario) -> Fields:
    if not has_coupled(s):
        return ()
    first = stream_seq_ids(s)[0]
    differs = any(
        history(s, token, seq) != history(s, token, first)
        for token, owners in enumerate(s.owners)
        for seq in owners
    )
    return ("raw",) if differs else ()


def _repeated(s: Scenario) -> Fields:
    if s.positions is None:
        return ()
    places = [
        (seq, int(pos)) for pos, ids in zip(s.positions, s.owners, strict=True) for seq in ids
    ]
    return ("raw", *_all_compressors(s)) if len(set(places)) < len(places) else ()


def _negative(s: Scenario) -> Fields:
    if s.positions is None or not (s.positions < 0).any():
        return ()
    return ("raw", *_all_compressors(s))


def _full(s: Scenario) -> Fields:
    return tuple(
        f"comp[{k}].plan.state_write_idxs"
        for k, case in enumerate(s.compressors)
        if _dummy_is_visible(s, case)
    )


def _dummy_is_visible(s: Scenario, case: CompressorCase) -> bool:
    if s.positions is None or not s.ids or not s.ids[0]:
        return False
    stream = s.ids[0][0]
    own = [pos for pos, ids in zip(s.positions, s.ids, strict=True) if stream in ids]
    no_block_closes = not ((s.positions + 1) % case.ratio == 0).any()
    return no_block_closes and (max(own) + 1) // case.ratio == case.rows


def _compacted(s: Scenario) -> Fields:
    compact = s.compact
    if compact is None:
        return ()
    if len(stream_seq_ids(s)) > 1:
        return ("raw",)
    held = [position for position, _ in s.cells[s.head : s.head + s.num_tokens]]
    positions = np.array(held) if s.positions is None else s.positions
    rows = positions - compact.base + compact.sink_rows
    if (rows != compact.head + np.arange(rows.size)).any():
        return ("raw",)
    first = stream_seq_ids(s)[0]
    pinned = any(
        0 <= position < min(compact.sink_rows, compact.base) and first in ids
        for position, ids in s.cells
    )
    reads = ("read_dst_idxs", "read_counts", "sinfo_read", "n_kv")
    return tuple(f"raw.raw.{name}" for name in reads) if pinned else ()


def _reserve(s: Scenario) -> Fields:
    if not s.reserve or not s.ids:
        return ()
    sequences, tokens = shape(s)
    owned = sum(len(owners) for owners in s.owners)
    return tuple(
        f"comp[{k}].reserve"
        for k, case in enumerate(s.compressors)
        if reserve_blocks(s, case.ratio) != max(1, sequences * -(-tokens // case.ratio))
        or owned > s.num_tokens
    )


def _small_or_huge(s: Scenario) -> Fields:
    small = [f"comp[{k}].valid" for k, c in enumerate(s.compressors) if c.rows < PAD]
    huge = s.positions is not None and (s.positions >= LARGEST_POSITION).any()
    return (*small, *(_all_compressors(s) if huge else ()))


def _invalid_ids(s: Scenario) -> Fields:
    return () if seq_ids_valid(s) else ("raw", *_all_compressors(s))


def _same_id_twice(s: Scenario) -> Fields:
    if s.positions is None:
        return ()
    return tuple(
        f"comp[{k}].plan.{field}"
        for k, case in enumerate(s.compressors)
        for field in ("state_read_idxs", "state_write_idxs", "state_write_pos")
        if any(
            (pos + 1) % case.ratio == 0 and len(set(ids)) < len(ids)
            for pos, ids in zip(s.positions, s.ids, strict=True)
        )
    )


def _all_compressors(s: Scenario) -> Fields:
    return tuple(f"comp[{k}]" for k in range(len(s.compressors)))


RULES = (
    Rule(
        number=1,
        why="streams that are not neighbours are logged as an error, yet accepted",
        ours="accepted without an error: rows are addressed by each stream's own offset",
        covers=_neighbours,
    ),
    Rule(
        number=3,
        why="unequal token counts of streams fail in the raw context",
        ours="planned: the splitter makes ubatches of equal counts",
        covers=_unequal,
    ),
    Rule(
        number=4,
        why="raw reads cover only the first sequence of the first token",
        ours="a coupled batch whose tokens have different histories is refused",
        covers=_coupled,
    ),
    Rule(
        number=5,
        why="a repeated position keeps the first token in the ring and writes a block twice",
        ours="refused before planning",
        covers=_repeated,
    ),
    Rule(
        number=6,
        why="the dummy block is written to a visible row when the compressed cache is full",
        ours="padded blocks go to spare rows behind all streams",
        covers=_full,
    ),
    Rule(
        number=7,
        why="negative positions shorten one list and not another",
        ours="refused before planning",
        covers=_negative,
    ),
    Rule(
        number=8,
        why="a compacted raw cache is addressed in two ways, checked at its first position only, "
        "and its pinned rows are never read",
        ours="one addressing by position, every position checked, pinned rows visible",
        covers=_compacted,
    ),
    Rule(
        number=9,
        why="reserve plans are too small for unequal streams and coupled tokens",
        ours="the sum of each sequence's own upper bound",
        covers=_reserve,
    ),
    Rule(
        number=10,
        why="fewer than 256 compressed rows never validate; the largest position overflows",
        ours="validated against the rows there are, in 64-bit numbers",
        covers=_small_or_huge,
    ),
    Rule(
        number=17,
        why="planning goes on, or asserts, with ids out of range or tokens without one",
        ours="refused before planning",
        covers=_invalid_ids,
    ),
    Rule(
        number=18,
        why="the same id twice on one token closes its block twice",
        ours="an id listed twice counts once",
        covers=_same_id_twice,
    ),
)
