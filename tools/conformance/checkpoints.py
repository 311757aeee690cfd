"""Level `ckpt`: our checkpoints driven by the recorded operations, state rows one value wide.

The originals choose a copy by their selected mode and the flag `use_gpu`; here that chooses among
three of our checkpoints, one each of mode delta, shadow and host. Their `reset` zeroes rows and
nothing else, so it stands below our bookkeeping, where the engine's `clear` voids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cachegraph.models.contract import CacheKind, CacheSpec, Contract, DType, RowLayout
from cachegraph.models.errors import ConfigError, RewindError
from cachegraph.runtime.binding import Array, Buffer
from cachegraph.runtime.checkpoint_book import MAX_DELTA_TOKENS, Book, Mode, check_max_tokens
from cachegraph.runtime.checkpoint_rows import StateCopies
from cachegraph.tools.conformance.prepared import Prepared, parse_prepared, prepare

DELTA_MODE = 1  # of the originals; every other one takes a copy by the flag
_KINDS = {
    "csa": CacheKind.CSA_STATE,
    "hca": CacheKind.HCA_STATE,
    "lid": CacheKind.LID_STATE,
}
_RING_ROWS = {CacheKind.CSA_STATE: 8, CacheKind.HCA_STATE: 128, CacheKind.LID_STATE: 8}


class HostRows:
    """A binder of plain arrays."""

    def beside(self, buffer: Buffer) -> HostRows:
        """Itself: all arrays are here."""
        return self

    def cache(self, initial: Array, dtype: DType) -> Buffer:
        """The array itself."""
        return Buffer(array=initial, value=None)

    def read_rows(self, buffer: Buffer, rows: Array) -> Array:
        """A copy of rows."""
        copy: Array = buffer.array[rows]
        return copy

    def write_rows(self, buffer: Buffer, rows: Array, values: Array) -> None:
        """Overwrite rows."""
        buffer.array[rows] = values

    def move_rows(self, source: Buffer, rows: Array, target: Buffer, places: Array) -> None:
        """Copy rows over those of another buffer."""
        target.array[places] = source.array[rows]


@dataclass(slots=True)
class _Branch:
    """One of our checkpoints: its bookkeeping and its copies."""

    book: Book
    copies: StateCopies
    last: dict[int, int] = field(default_factory=dict)  # tokens before the last decode


class Replayer:
    """State rows and checkpoints of one scenario."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self._streams = max(1, record["in"]["n_seq_max"])
        self._binder = HostRows()
        specs = tuple(_spec(kind, self._streams) for kind in _KINDS.values())
        self._contract = Contract(rows=(), caches=specs)
        self._caches = {
            spec.name: self._binder.cache(np.zeros(spec.shape, np.float32), spec.dtype)
            for spec in specs
        }
        self._selected: int | None = None
        self._has_device = True
        self._num_decodes = 0
        self._branches: dict[Mode, _Branch] = {}

    def run(self) -> list[dict[str, Any]]:
        """What each operation answers, and the state rows after it."""
        handlers = {
            "init": self._init,
            "save": self._save,
            "decode": self._decode,
            "restore": self._restore,
            "discard": self._discard,
            "reset": self._reset,
            "backend": self._backend,
        }
        return [
            {"op": op["op"]} | handlers[op["op"]](op) | {"state": self._state()}
            for op in self._record["in"]["ops"]
        ]

    def _init(self, op: Mapping[str, Any]) -> dict[str, Any]:
        self._selected = None
        if op["mode"] == DELTA_MODE:
            try:
                self._prepare_delta(op["max_tokens"])
            except ConfigError:
                return {"ok": False}
        self._selected = op["mode"]
        return {"ok": True}

    def _prepare_delta(self, max_tokens: int) -> None:
        check_max_tokens(Mode.DELTA, max_tokens, MAX_DELTA_TOKENS)
        branch = self._branches.get(Mode.DELTA)
        if branch is None:
            self._branch(Mode.DELTA, max_tokens)
        elif max_tokens > branch.book.max_tokens:
            branch.copies.grow(max_tokens)
            branch.book.max_tokens = max_tokens

    def _branch(self, mode: Mode, max_tokens: int = 1) -> _Branch:
        if mode not in self._branches:
            copies = StateCopies(
                mode, max_tokens, _KINDS.values(), self._contract, self._binder, self._caches
            )
            self._branches[mode] = _Branch(Book(mode, max_tokens, _RING_ROWS), copies)
        return self._branches[mode]

    def _save(self, op: Mapping[str, Any]) -> dict[str, Any]:
        if self._selected == DELTA_MODE:
            mode = Mode.DELTA
        else:
            mode = Mode.SHADOW if op["use_gpu"] else Mode.HOST
            self._branch(Mode.SHADOW).book.discard()
        branch = self._branch(mode)
        branch.book.discard()
        if mode is Mode.DELTA and not op["use_gpu"]:
            return {"ok": False}
        if mode is Mode.SHADOW:
            if not self._has_device:
                return {"ok": False}
            self._branch(Mode.HOST).book.discard()
        branch.copies.save()
        branch.book.save(dict.fromkeys(range(self._streams), (0, 0)))
        branch.last = {}
        return {"ok": True}

    def _decode(self, op: Mapping[str, Any]) -> dict[str, Any]:
        case = step_of(self._record, op)
        plans = prepare(case)
        if not plans["ok"]:
            return {"prepare_ok": False}
        self._num_decodes += 1
        for name, kind in _KINDS.items():
            rows = np.array(plans[name]["state_persist_dst_idxs"], np.int64)
            source = np.array(plans[name]["state_persist_src_idxs"], np.int64)
            self._rows(kind)[rows, 0] = 1000 * self._num_decodes + source
        branch = self._branches.get(Mode.DELTA)
        if branch is None or not branch.book.is_saved:
            return {"prepare_ok": True, "capture_ok": True}
        return {"prepare_ok": True, "capture_ok": self._record_rows(branch, case)}

    def _record_rows(self, branch: _Branch, case: Prepared) -> bool:
        """Note a decode by sequence; false where a checkpoint is void after it."""
        step, book = case.step, branch.book
        positions = [] if step.positions is None else step.positions.tolist()
        is_whole = True
        for seq in range(self._streams):
            own = [row for row, ids in enumerate(step.owners) if seq in ids]
            if not self._has_device:
                book.void(seq, "no device copy can be had")
            elif own:
                branch.last[seq] = book.standing(seq)
                numbers = book.note(seq, [positions[row] for row in own], own)
                if numbers is not None:
                    branch.copies.record(seq, [positions[row] for row in own], numbers)
            is_whole &= not book.is_void(seq)
        return is_whole

    def _restore(self, op: Mapping[str, Any]) -> dict[str, Any]:
        if self._selected == DELTA_MODE:
            return {"result": self._restore_delta(op["accepted_step"])}
        shadow, host = self._branches.get(Mode.SHADOW), self._branches.get(Mode.HOST)
        if op["use_gpu"] and shadow is not None and shadow.book.is_saved:
            branch = shadow if self._has_device else None
        else:
            branch = host if host is not None and host.book.is_saved else None
        if branch is None:
            return {"result": 0}
        for seq in range(self._streams):
            branch.copies.restore(seq, {})
        return {"result": 2}

    def _restore_delta(self, accepted_step: int) -> int:
        branch = self._branches[Mode.DELTA]
        book = branch.book
        try:
            records = [book.check(seq, 0) for seq in range(self._streams)]
        except RewindError:
            return 0
        for seq, record in enumerate(records):
            before = branch.last.get(seq, 0)
            kept = before + sum(row <= accepted_step for row in record.tokens[before:])
            branch.copies.restore(seq, book.kept_rows(seq, kept))
            record.standing = kept
        return 1

    def _discard(self, op: Mapping[str, Any]) -> dict[str, Any]:
        for branch in self._branches.values():
            branch.book.discard()
        return {}

    def _reset(self, op: Mapping[str, Any]) -> dict[str, Any]:
        seq = op["seq_id"]
        for kind, size in _RING_ROWS.items():
            if seq < 0:
                self._rows(kind)[...] = 0
            elif seq < self._streams:
                self._rows(kind)[seq * size : (seq + 1) * size] = 0
        return {}

    def _backend(self, op: Mapping[str, Any]) -> dict[str, Any]:
        self._has_device = op["present"]
        return {}

    def _state(self) -> dict[str, list[list[int]]]:
        held = {name: self._rows(kind)[:, 0] for name, kind in _KINDS.items()}
        return {
            name: [[int(row), int(rows[row])] for row in rows.nonzero()[0]]
            for name, rows in held.items()
        }

    def _rows(self, kind: CacheKind) -> Array:
        return self._caches[f"cache.0.{kind.value}"].array


def step_of(record: Mapping[str, Any], op: Mapping[str, Any]) -> Prepared:
    """The step of a `decode`, with what its scenario says of the model."""
    return parse_prepared(record, {**record["in"], "kv": op["kv"], "batch": op["batch"]})


def recorded_steps(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The recorded fields that are compared; of a step that was refused no capture is."""
    return [
        {
            name: value
            for name, value in step.items()
            if name != "errors" and (name != "capture_ok" or step["prepare_ok"])
        }
        for step in steps
    ]


def _spec(kind: CacheKind, streams: int) -> CacheSpec:
    layout = RowLayout(rows_per_stream=_RING_ROWS[kind], streams=streams)
    return CacheSpec(layer=0, kind=kind, dtype=DType.FLOAT32, width=1, layout=layout)
