"""Our logical plans in the recorded form.

Owns the recorded padding: raw reads to a multiple of 256, `n_kv` rounded up, a dummy block for
ratio 4 where none closes. A refusal of ours is `ok: False` (raw) or `refused` (compressor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cachegraph.models.errors import CachegraphError, PlanError
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.cells import CellView
from cachegraph.runtime.planners.compressor import (
    CompressorPlan,
    CompressorSizes,
    PlanTokens,
    plan_compressor,
)
from cachegraph.runtime.planners.raw import RawPlan, plan_raw
from cachegraph.runtime.planners.validate import (
    validate_compressor,
    validate_raw,
    validate_tokens,
)
from cachegraph.tools.conformance.helpers import (
    has_coupled,
    helper_fields,
    seq_ids_valid,
    sinfo,
    stream_seq_ids,
)
from cachegraph.tools.conformance.scenario import Compact, CompressorCase, Scenario

PAD = 256
_LISTS = tuple(name for name in CompressorPlan.__dataclass_fields__ if name != "num_exposed")
RAW_LISTS = (
    "write_src_idxs",
    "write_dst_idxs",
    "read_dst_idxs",
    "write_counts",
    "read_counts",
)
DUMMY_RATIO = 4  # the originals put a dummy block where no block of this ratio closes


def answer(scenario: Scenario) -> dict[str, Any]:
    """Every recorded field of a scenario, as we answer it."""
    out: dict[str, Any] = helper_fields(scenario)
    out["raw"] = _raw(scenario)
    out["comp"] = [_compressor(scenario, case) for case in scenario.compressors]
    return out


def plan_tokens(scenario: Scenario, positions: IntArray) -> PlanTokens:
    """The batch as planners take it.

    PlanError for what is refused before planning: bad ids, negative and repeated positions.
    """
    _check_ids(scenario)
    tokens = PlanTokens.of_owners(positions, scenario.owners)
    validate_tokens(tokens)
    return tokens


def _check_ids(scenario: Scenario) -> None:
    if not seq_ids_valid(scenario):
        raise PlanError("a token belongs to no sequence, or to one that is out of range")


def _raw(scenario: Scenario) -> dict[str, Any]:
    try:
        _check_ids(scenario)
        if scenario.positions is not None:
            plan_tokens(scenario, scenario.positions)
        return {"ok": True, "raw": _raw_lists(scenario)}
    except CachegraphError:
        return {"ok": False}


def _raw_lists(scenario: Scenario) -> dict[str, Any]:
    count = scenario.num_tokens
    if count == 0:
        empty = helper_fields(scenario)["comp_sinfo"]
        return {name: [] for name in RAW_LISTS} | {
            "sinfo_write": empty,
            "sinfo_read": empty,
            "graph_n_stream": 1,
            "n_kv": 0,
        }
    streams = stream_seq_ids(scenario)
    _check_histories(scenario, streams[0])
    source = _stream_major(scenario, streams)
    plan = _plan_raw(scenario, streams, source)
    reads = np.split(plan.read_idxs, np.cumsum(plan.read_counts)[:-1])
    longest = int(plan.read_counts.max())
    owned = [[i for i, ids in enumerate(scenario.ids) if seq in ids] for seq in streams]
    return {
        "write_src_idxs": source.tolist(),
        "write_dst_idxs": plan.write_idxs.tolist(),
        "read_dst_idxs": [row for part in reads for row in _padded(part, longest)],
        "write_counts": [count],
        "read_counts": plan.read_counts.tolist(),
        "sinfo_write": sinfo(streams, [[scenario.head + i for i in rows] for rows in owned]),
        "sinfo_read": sinfo(streams, [part.tolist() for part in reads]),
        "graph_n_stream": len(streams),
        "n_kv": longest,
    }


def _plan_raw(scenario: Scenario, streams: Sequence[int], source: IntArray) -> RawPlan:
    """The validated plan, its writes in the order of `source`."""
    compact = scenario.compact
    slots = scenario.head + np.arange(scenario.num_tokens)
    size = len(scenario.cells)
    if slots[-1] >= size:
        raise PlanError(f"raw plan: slot {slots[-1]} of a cache of {size} cells")
    held = np.array([scenario.cells[slot][0] for slot in slots], np.int64)
    positions = held if scenario.positions is None else scenario.positions
    view = cell_view(scenario)
    if compact is None:
        rows, num_rows = slots, size
    else:
        rows, num_rows = _compact_rows(compact, held, positions), compact.num_rows
    plan = plan_raw(view, write_idxs=rows[source], streams=streams)
    validate_raw(plan, view, positions[source], num_rows=num_rows)
    return plan


def _compact_rows(compact: Compact, held: IntArray, positions: IntArray) -> IntArray:
    """Write rows of a compacted cache, by position; every token's is checked."""
    rows = positions - compact.base + compact.sink_rows
    wanted = compact.head + np.arange(positions.size)
    wrong = (rows != wanted) | (held != positions)
    if wrong.any():
        at = int(wrong.argmax())
        raise PlanError(
            f"raw plan: write_idxs[{at}]: position {positions[at]} belongs in row {rows[at]}, "
            f"row {wanted[at]} is reserved"
        )
    return rows


def cell_view(scenario: Scenario) -> CellView:
    """The cell table of a scenario. Compacted: the rows of pinned and recent positions."""
    compact = scenario.compact
    positions = np.array([position for position, _ in scenario.cells], np.int64)
    members = np.zeros((scenario.num_streams, positions.size), np.bool_)
    for slot, (_, ids) in enumerate(scenario.cells):
        for seq in ids:
            if 0 <= seq < scenario.num_streams:
                members[seq, slot] = True
    if compact is None:
        return CellView(positions=positions, members=members)
    recent = positions >= compact.base
    pinned = (positions >= 0) & (positions < compact.sink_rows)
    kept = recent | pinned
    rows = np.where(recent, positions - compact.base + compact.sink_rows, positions)
    return CellView(positions=positions[kept], members=members[:, kept], rows=rows[kept])


def _check_histories(scenario: Scenario, first: int) -> None:
    """With coupled tokens one read list serves all: it must be each token's own history."""
    if not has_coupled(scenario):
        return
    for token, owners in enumerate(scenario.owners):
        for seq in owners:
            if history(scenario, token, seq) != history(scenario, token, first):
                raise PlanError(
                    f"raw plan: token {token} is owned by {owners}, whose histories differ; "
                    "decode it once for each sequence"
                )


def history(scenario: Scenario, token: int, seq: int) -> set[int]:
    """Slots that a token may see in a sequence."""
    limit = None if scenario.positions is None else int(scenario.positions[token])
    return {
        slot
        for slot, (position, ids) in enumerate(scenario.cells)
        if position >= 0 and seq in ids and (limit is None or position <= limit)
    }


def _stream_major(scenario: Scenario, streams: Sequence[int]) -> IntArray:
    """Token order of the writes: as given for one stream, else stream after stream."""
    if len(streams) == 1:
        return np.arange(scenario.num_tokens)
    return np.array([i for s in streams for i, ids in enumerate(scenario.ids) if s in ids])


def _padded(rows: IntArray, longest: int) -> list[int]:
    length = -(-longest // PAD) * PAD
    listed: list[int] = rows.tolist()
    return listed + [listed[-1] if listed else 0] * (length - len(listed))


def _compressor(scenario: Scenario, case: CompressorCase) -> dict[str, Any] | None:
    if scenario.positions is None:
        return None
    try:
        tokens = plan_tokens(scenario, scenario.positions)
    except PlanError:
        return {"refused": True}
    sizes = CompressorSizes(
        ratio=case.ratio,
        overlap=case.overlap,
        ring_rows=case.ring_rows,
        rows_per_stream=case.rows,
        streams=scenario.num_streams,
    )
    plan = plan_compressor(sizes, tokens)
    lists = _plan_lists(plan, len(stream_seq_ids(scenario)))
    if plan.num_blocks == 0 and case.ratio == DUMMY_RATIO and scenario.num_tokens:
        lists |= _dummy(sizes, tokens, plan)
    out = {"refused": False, "plan": lists, "valid": _is_valid(sizes, plan, lists["n_kv"])}
    if scenario.reserve:
        out |= {"reserve": reserve_plan(scenario, case), "reserve_valid": case.rows > 0}
    return out


def _plan_lists(plan: CompressorPlan, num_streams: int) -> dict[str, Any]:
    lists: dict[str, Any] = {name: getattr(plan, name).tolist() for name in _LISTS}
    highest = max(lists["n_visible"], default=0)
    return lists | {"n_stream": num_streams, "n_kv": max(PAD, -(-highest // PAD) * PAD)}


def _dummy(sizes: CompressorSizes, tokens: PlanTokens, plan: CompressorPlan) -> dict[str, Any]:
    """The originals' dummy block: token 0 read throughout, the last row of its stream written.

    Where that row is visible ours is a spare row, behind all streams.
    """
    stream = int(tokens.owner_streams[0])
    own = tokens.owner_tokens[tokens.owner_streams == stream]
    is_visible = int(plan.n_visible[own].max()) == sizes.rows_per_stream
    spare = sizes.rows_per_stream * sizes.streams
    last = (stream + 1) * sizes.rows_per_stream - 1
    return {
        "state_read_idxs": [sizes.state_rows] * sizes.window,
        "state_write_idxs": [spare if is_visible else last],
        "state_write_pos": [0],
    }


def _is_valid(sizes: CompressorSizes, plan: CompressorPlan, n_kv: int) -> bool:
    """Our own validation; from 256 rows on, the rounded n_kv must fit too."""
    try:
        validate_compressor("compressor", sizes, plan, plan.n_visible.size)
    except PlanError:
        return False
    return n_kv <= sizes.rows_per_stream or sizes.rows_per_stream < PAD


def reserve_plan(scenario: Scenario, case: CompressorCase) -> dict[str, Any]:
    """Lengths of the largest plan that a batch of this shape can need, as lists of zeros."""
    count = scenario.num_tokens
    lengths = dict.fromkeys(_LISTS, 0)
    if count:
        blocks = reserve_blocks(scenario, case.ratio)
        owned = sum(len(owners) for owners in scenario.owners)
        window = case.ratio * (2 if case.overlap else 1)
        persist = min(owned, case.ring_rows * scenario.num_streams)
        lengths |= dict.fromkeys(
            ("state_pos", "state_delta_src_idxs", "state_delta_dst_idxs", "n_visible"), count
        )
        lengths |= dict.fromkeys(("state_persist_src_idxs", "state_persist_dst_idxs"), persist)
        lengths |= {"state_read_idxs": window * blocks}
        lengths |= dict.fromkeys(("state_write_idxs", "state_write_pos"), blocks)
    zeros: dict[str, Any] = {name: [0] * length for name, length in lengths.items()}
    return zeros | {"n_stream": len(stream_seq_ids(scenario)), "n_kv": case.rows}


def no_plan() -> dict[str, Any]:
    """The compressor plan of a step that has none."""
    none: dict[str, Any] = {name: [] for name in _LISTS}
    return none | {"n_stream": 1, "n_kv": 0}


def reserve_blocks(scenario: Scenario, ratio: int) -> int:
    """Most blocks that close when each sequence gets its tokens at consecutive positions."""
    counts: dict[int, int] = {}
    for owners in scenario.owners:
        for seq in owners:
            counts[seq] = counts.get(seq, 0) + 1
    return max(1, sum(-(-n // ratio) for n in counts.values()))
