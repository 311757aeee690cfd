"""A recorded scenario, decoded. Reads the file format; judges nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cachegraph.models.errors import ConfigError
from cachegraph.runtime.batch import IntArray, SeqIds


@dataclass(frozen=True, kw_only=True, slots=True)
class Compact:
    """A compacted raw cache: rows by position, after `sink_rows` pinned ones."""

    num_rows: int
    sink_rows: int
    head: int
    base: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorCase:
    """One compressor of a scenario. rows: compressed rows of a stream."""

    ratio: int
    overlap: bool
    ring_rows: int
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Input of one step, and the recorded output of its scenario.

    ids: of each token as given, repeats included; sequence 0 where the record has none.
    cells: (position, ids) of each slot, position -1 where empty. positions: None for a null
    pointer.
    """

    id: str
    kind: str
    num_streams: int
    cells: tuple[tuple[int, tuple[int, ...]], ...]
    head: int
    compact: Compact | None
    positions: IntArray | None
    ids: SeqIds
    compressors: tuple[CompressorCase, ...]
    reserve: bool
    recorded: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return len(self.ids)

    @property
    def owners(self) -> SeqIds:
        """The distinct ids of each token, in the order given."""
        return tuple(tuple(dict.fromkeys(ids)) for ids in self.ids)


def load_scenarios(path: Path) -> list[Mapping[str, Any]]:
    """Every scenario of a file, lists expanded; ConfigError where it is no vector file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["scenarios"]
        return [expand(item) for item in found]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as fault:
        raise ConfigError(f"{path}: not a file of planner vectors: {fault!r}") from fault


def expand(value: Any) -> Any:
    """Undo the list encoding {"ap": [[start, step, count], ...]}, recursively."""
    if isinstance(value, dict):
        if set(value) == {"ap"}:
            return [start + step * i for start, step, n in value["ap"] for i in range(n)]
        return {key: expand(item) for key, item in value.items()}
    return [expand(item) for item in value] if isinstance(value, list) else value


def parse(record: Mapping[str, Any]) -> Scenario:
    """The typed form of a scenario of level `plan`."""
    given = record["in"]
    compressors = tuple(
        CompressorCase(ratio=r, overlap=bool(o), ring_rows=ring, rows=rows)
        for r, o, ring, rows in given["comp"]
    )
    return parse_step(record, given, compressors, given["reserve"])


def parse_step(
    record: Mapping[str, Any],
    given: Mapping[str, Any],
    compressors: tuple[CompressorCase, ...],
    reserve: bool,
) -> Scenario:
    """One step of a record: `given` has `n_seq_max`, `kv` and `batch`."""
    batch = given["batch"]
    if batch["seq"] is None:
        ids: SeqIds = ((0,),) * batch["n_tokens"]
    else:
        ids = tuple(tuple(owners) for n, owners in batch["seq"] for _ in range(n))
    positions = None if batch["pos"] is None else np.array(batch["pos"], np.int64)
    return Scenario(
        id=record["id"],
        kind=record["kind"],
        num_streams=max(1, given["n_seq_max"]),
        cells=_cells(given["kv"]),
        head=given["kv"]["head"],
        compact=_compact(given["kv"]["compact"]),
        positions=positions,
        ids=ids,
        compressors=compressors,
        reserve=reserve,
        recorded=record["out"],
    )


def _cells(kv: Mapping[str, Any]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    cells: list[tuple[int, tuple[int, ...]]] = [(-1, ())] * kv["size"]
    for slot, position, count, owners in kv["cells"]:
        for i in range(count):
            cells[slot + i] = (position + i, tuple(owners))
    return tuple(cells)


def _compact(given: Mapping[str, int] | None) -> Compact | None:
    if given is None:
        return None
    return Compact(
        num_rows=given["size_swa"],
        sink_rows=given["sink_rows"],
        head=given["head_swa"],
        base=given["pos_base_swa"],
    )
