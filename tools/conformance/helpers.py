"""The recorded helper fields: how the originals group the ids of a batch into streams."""

from __future__ import annotations

from typing import Any

from cachegraph.tools.conformance.scenario import Scenario

Streams = list[int]


def helper_fields(scenario: Scenario) -> dict[str, Any]:
    """Every recorded field that is made from the ids alone."""
    streams = stream_seq_ids(scenario)
    sinfo, has_errors = comp_sinfo(scenario, streams)
    return {
        "shape": shape(scenario),
        "has_coupled": has_coupled(scenario),
        "unique_seq_ids": unique_seq_ids(scenario),
        "graph_n_stream": len(streams),
        "stream_seq_ids": streams,
        "seq_ids_valid": seq_ids_valid(scenario),
        "comp_sinfo": sinfo,
        "comp_sinfo_errors": has_errors,
    }


def has_coupled(scenario: Scenario) -> bool:
    """Whether a token lists more than one id, equal ones counted."""
    return any(len(ids) > 1 for ids in scenario.ids)


def unique_seq_ids(scenario: Scenario) -> Streams:
    """Ids by first appearance; [0] if there is none."""
    return list(dict.fromkeys(seq for ids in scenario.ids for seq in ids)) or [0]


def stream_seq_ids(scenario: Scenario) -> Streams:
    """The ids that the step's streams stand for."""
    unique = unique_seq_ids(scenario)
    if scenario.num_streams == 1:
        return [0]
    return unique[:1] if has_coupled(scenario) else unique


def seq_ids_valid(scenario: Scenario) -> bool:
    """Whether every token has an id and every id is in range."""
    return all(
        ids and all(0 <= seq < scenario.num_streams for seq in ids) for ids in scenario.ids
    )


def shape(scenario: Scenario) -> list[int]:
    """[ids, tokens each] where tokens have one id and ids equal counts, else [1, tokens]."""
    if scenario.ids and all(len(ids) == 1 for ids in scenario.ids):
        unique = unique_seq_ids(scenario)
        counts = {sum(ids[0] == seq for ids in scenario.ids) for seq in unique}
        if len(counts) == 1:
            return [len(unique), counts.pop()]
    return [1, max(1, scenario.num_tokens)]


def comp_sinfo(scenario: Scenario, streams: Streams) -> tuple[dict[str, Any], bool]:
    """The slot record of the compressed caches, and whether an id was out of range."""
    if scenario.num_streams == 1:
        return sinfo([0], [[0]]), False
    inside = [0 <= seq < scenario.num_streams for seq in streams]
    if not any(inside):
        return sinfo([0], [[0]]), True
    record = {
        "s0": min(seq for seq, ok in zip(streams, inside, strict=True) if ok),
        "s1": max(seq for seq, ok in zip(streams, inside, strict=True) if ok),
        "strm": [seq if ok else 0 for seq, ok in zip(streams, inside, strict=True)],
        "idxs": [[0] if ok else [] for ok in inside],
    }
    return record, not all(inside)


def sinfo(streams: Streams, idxs: list[list[int]]) -> dict[str, Any]:
    """A slot record of valid streams."""
    return {"s0": min(streams), "s1": max(streams), "strm": streams, "idxs": idxs}
