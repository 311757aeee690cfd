"""The originals' checkpoints, written from the words of the vectors' README, faults included.

Shares no code with ours. Makes scenarios of level `ckpt` as they would have been recorded, so that
many more than the recorded ones can be judged.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

RINGS = {"csa": 8, "hca": 128, "lid": 8}
State = dict[str, dict[int, int]]


class Originals:
    """State rows (those that are not zero), the per-step checkpoint and the two whole copies."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.rows: State = {name: {} for name in RINGS}
        self.mode: int | None = None
        self.capacity = 0
        self.base: State | None = None
        self.recorded: dict[str, list[tuple[int, int]]] = {name: [] for name in RINGS}
        self.deltas: dict[str, dict[int, int]] = {name: {} for name in RINGS}
        self.device: State | None = None
        self.host: State | None = None
        self.backend = True
        self.decodes = 0

    def run(self, op: Mapping[str, Any]) -> dict[str, Any]:
        """One operation, as it would be recorded."""
        answer = getattr(self, f"_{op['op']}")(op) or {}
        state = {
            name: [list(row) for row in sorted(rows.items())]
            for name, rows in self.rows.items()
        }
        return {"op": op["op"], **answer, "errors": [], "state": state}

    def _copy(self, state: State) -> State:
        return {name: dict(rows) for name, rows in state.items()}

    def _backend(self, op: Mapping[str, Any]) -> None:
        self.backend = op["present"]

    def _init(self, op: Mapping[str, Any]) -> dict[str, Any]:
        self.mode = None
        if op["mode"] == 1:
            if not 0 < op["max_tokens"] <= 8:
                return {"ok": False}
            if op["max_tokens"] > self.capacity:
                self.capacity, self.base = op["max_tokens"], None
        self.mode = op["mode"]
        return {"ok": True}

    def _save(self, op: Mapping[str, Any]) -> dict[str, Any]:
        if self.mode == 1:
            self.base, self.recorded = None, {name: [] for name in RINGS}
            if op["use_gpu"]:
                self.base = self._copy(self.rows)
            return {"ok": op["use_gpu"]}
        self.device = None
        if not op["use_gpu"]:
            self.host = self._copy(self.rows)
            return {"ok": True}
        if not self.backend:
            return {"ok": False}
        self.device, self.host = self._copy(self.rows), None
        return {"ok": True}

    def _decode(self, op: Mapping[str, Any]) -> dict[str, Any]:
        ids = [owners for count, owners in op["batch"]["seq"] for _ in range(count)]
        positions = op["batch"]["pos"]
        self.decodes += 1
        for name, size in RINGS.items():
            places = [
                (i, owners[0] * size + positions[i] % size) for i, owners in enumerate(ids)
            ]
            if self.mode == 1:
                self.recorded[name] = places
            for i, owners in sorted(enumerate(ids), key=lambda item: positions[item[0]]):
                for seq in owners:
                    self.rows[name][seq * size + positions[i] % size] = 1000 * self.decodes + i
        is_captured = True
        if self.mode == 1 and self.base is not None:
            is_captured = self.backend and len(ids) <= self.capacity
            if is_captured:
                for name in RINGS:
                    for i, row in self.recorded[name]:
                        self.deltas[name][i] = self.rows[name][row]
        return {"prepare_ok": True, "capture_ok": is_captured}

    def _restore(self, op: Mapping[str, Any]) -> dict[str, Any]:
        if self.mode == 1:
            return {"result": self._restore_steps(op["accepted_step"])}
        if op["use_gpu"] and self.device is not None:
            if not self.backend:
                return {"result": 0}
            self.rows = self._copy(self.device)
            return {"result": 2}
        if self.host is None:
            return {"result": 0}
        self.rows = self._copy(self.host)
        return {"result": 2}

    def _restore_steps(self, accepted_step: int) -> int:
        if self.base is None:
            return 0
        self.rows = self._copy(self.base)
        if len(self.recorded["csa"]) > self.capacity:
            return 0
        for name, places in self.recorded.items():
            for i, row in places:
                if i <= accepted_step:
                    self.rows[name][row] = self.deltas[name].get(i, 0)
                    if not self.rows[name][row]:
                        del self.rows[name][row]
        return 1

    def _discard(self, op: Mapping[str, Any]) -> None:
        self.base = self.device = self.host = None
        self.recorded = {name: [] for name in RINGS}

    def _reset(self, op: Mapping[str, Any]) -> None:
        for name, size in RINGS.items():
            self.rows[name] = {
                row: value
                for row, value in self.rows[name].items()
                if op["seq_id"] >= self.streams or 0 <= op["seq_id"] != row // size
            }


def random_record(seed: int, length: int = 14) -> dict[str, Any]:
    """A scenario of random operations with what the originals answer."""
    draw = random.Random(seed)
    streams = draw.choice([1, 1, 2, 3])
    originals = Originals(streams)
    ends = [0] * streams
    ops, steps = [], []
    for _ in range(length):
        ops.append(_op(draw, ends))
        steps.append(originals.run(ops[-1]))
    given = {"n_seq_max": streams, "n_ctx": 4096, "model": {"ratios": [4, 128]}, "ops": ops}
    return {
        "id": f"r{seed}",
        "kind": "random",
        "level": "ckpt",
        "in": given,
        "out": {"steps": steps},
    }


def _op(draw: random.Random, ends: list[int]) -> dict[str, Any]:
    kinds = ["decode", "init", "save", "restore", "discard", "reset", "backend"]
    kind = draw.choices(kinds, [10, 4, 6, 7, 1, 1, 1])[0]
    flag = draw.random() < 0.7
    fields: dict[str, Any] = {
        "decode": {},
        "init": {
            "mode": draw.choice([1, 1, 1, 2, 3]),
            "max_tokens": draw.choice([8, 4, 2, 0, 9]),
        },
        "save": {"use_gpu": flag},
        "restore": {"use_gpu": flag, "accepted_step": draw.randrange(-1, 8)},
        "discard": {},
        "reset": {"seq_id": draw.randrange(-1, len(ends) + 1)},
        "backend": {"present": flag},
    }[kind]
    return {"op": kind} | fields | (_batch(draw, ends) if kind == "decode" else {})


def _batch(draw: random.Random, ends: list[int]) -> dict[str, Any]:
    """The next tokens of some sequences, equally many of each, now and then some steps back."""
    count = draw.choice([1, 1, 2, 3, 4, 5, 9])
    seqs = draw.sample(range(len(ends)), draw.choice([1, len(ends)]))
    positions, owners, cells = [], [], []
    for seq in seqs:
        ends[seq] = max(0, ends[seq] - draw.choice([0, 0, 0, 1, 3]))
        for _ in range(count):
            cells.append([len(cells), ends[seq], 1, [seq]])
            positions.append(ends[seq])
            owners.append([1, [seq]])
            ends[seq] += 1
    kv = {"size": 64, "head": 0, "cells": cells, "compact": None}
    batch = {"n_tokens": len(positions), "pos": positions, "seq": owners}
    return {"kv": kv, "batch": batch}
