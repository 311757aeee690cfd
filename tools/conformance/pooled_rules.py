"""Where the originals' pooled plans are wrong, and what we answer instead.

A watch plays the cells of a scenario back, without a planner, and says which rule speaks of which
recorded fields. Nothing else may differ. tests/conformance has a test of each right answer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from cachegraph.runtime.batch import BoolArray, IntArray
from cachegraph.tools.conformance.pooled_cells import Cells, Part, parse_parts
from cachegraph.tools.conformance.rules import Fields, Rule

_NEW = ("n_new", "n_new_g", "is_new", "new_pool_idxs", "new_pool_rep", "new_pool_pos")
_TAIL = ("tail_idxs", "sel")
_POOLS = (
    "n_pool_real",
    "n_pool",
    "pool_cells",
    "pool_idxs",
    "mask_start",
    "mask_n",
    *_TAIL,
    *_NEW,
)
_GROUPS = (*_POOLS, "layout")
_ROWS = ("pool_cells", *_NEW)


def _rule(number: int, why: str, ours: str) -> Rule:
    return Rule(number=number, why=why, ours=ours, covers=lambda scenario: ())


POOLED_RULES = (
    _rule(
        12,
        "after a copy, an edit of one side leaves the other with keys of other members",
        "an edit of shared cells stales all their sequences; pools that would share a row, but not "
        "their members, get a row each",
    ),
    _rule(
        13,
        "tokens inserted before others regroup pools whose keys are not made again",
        "every pool that changed is made again",
    ),
    _rule(
        14,
        "by position, tokens of a block with a gap or a repeat see nothing of it",
        "a repeat takes a slot of its own; a group with a hole has no pool; the tail is the newest "
        "visible tokens, as many as are left when they are cut into groups",
    ),
    _rule(15, "among equal positions rank follows the cell number", "the order of insertion"),
    _rule(
        16,
        "a pool completed by a batch that was dropped is never made",
        "only success makes a key known: the pool is made by the next step",
    ),
    _rule(17, "ids out of range are planned, or assert", "the batch is refused"),
    _rule(
        19,
        "cells that free themselves in a sliding window are not marked stale",
        "pooled keys with a sliding window are refused",
    ),
    _rule(
        20,
        "pools and tail of a token with several ids are those of the first",
        "a batch with such tokens is refused where their histories differ",
    ),
)
_RULE = {rule.number: rule for rule in POOLED_RULES}


def pooled_rules(record: Mapping[str, Any]) -> list[tuple[Rule, Fields]]:
    """The rules that apply to a pooled scenario, and the recorded fields that each covers."""
    found: dict[int, dict[str, None]] = {}
    for number, field in _Watch(record).faults():
        found.setdefault(number, {})[field] = None
    return [(_RULE[number], tuple(fields)) for number, fields in sorted(found.items())]


class _Watch:
    """The cells of a scenario, and what of the originals' memory is wrong from some step on."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self._given = record["in"]
        self._cells = Cells(self._given)
        self._size: int = self._given["kpool"]
        self._uncomputed = np.zeros(self._cells.positions.size, np.bool_)
        self._shared: set[int] = set()  # sequences whose cells another one's edit moved
        self._has_met = False  # whether two pools have met in one row

    def faults(self) -> Iterator[tuple[int, str]]:
        """Rule numbers and the fields that each covers."""
        steps = self._record["steps"]
        for at, (op, step) in enumerate(zip(self._record["ops"], steps, strict=False)):
            rest = [f"steps[{later}]" for later in range(at, len(steps))]
            if op["op"] == "batch":
                number = self._refusal(op, step)
                if number:
                    yield from ((number, field) for field in rest)
                    return
                if step.get("status") == 0:
                    yield from self._batch(at, op, step)
            elif op["op"] == "full":
                continue
            elif self._edit(op):
                for field in rest:
                    yield 12, f"{field}.stale"
                    yield 12, f"{field}.stale_after"

    def _refusal(self, op: Mapping[str, Any], step: Mapping[str, Any]) -> int:
        if self._given.get("n_swa"):
            return 19
        parts = parse_parts(op, step)
        known = range(self._cells.sequences)
        if not all(ids and all(s in known for s in ids) for p in parts for ids in p.ids):
            return 17
        return 20 if step.get("status") == 0 and self._parts_ways(parts) else 0

    def _parts_ways(self, parts: list[Part]) -> bool:
        """Whether the sequences of a coupled token hold other cells before it."""
        if all(len(owners) == 1 for part in parts for owners in part.owners):
            return False
        trial = copy.deepcopy(self._cells)
        for part in parts:
            if part.cells is None:
                break
            trial.place(part)
            for row, owners in zip(trial.rows(part).tolist(), part.owners, strict=True):
                histories = [_ranked(trial, seq)[0].tolist() for seq in owners]
                first, *others = [rows[: rows.index(row)] for rows in histories]
                if any(other != first for other in others):
                    return True
        return False

    def _batch(
        self, at: int, op: Mapping[str, Any], step: Mapping[str, Any]
    ) -> Iterator[tuple[int, str]]:
        for number, part in enumerate(parse_parts(op, step)):
            if part.cells is None:
                break
            where = f"steps[{at}].ub[{number}]"
            is_late = self._is_late(part)
            self._cells.place(part)
            self._has_met = self._has_met or self._meet()
            for rule, names in self._ubatch(part, is_late):
                yield from ((rule, f"{where}.{name}") for name in names)
            self._uncomputed &= self._cells.members.any(axis=0)
            if op.get("abort_at") == number:
                self._uncomputed[self._cells.rows(part)] = True
            else:
                self._uncomputed[:] = False

    def _ubatch(self, part: Part, is_late: bool) -> Iterator[tuple[int, Fields]]:
        """Rules that speak of a ubatch whose cells are placed, and the fields of it."""
        if self._has_met:
            yield 12, _ROWS
        if self._shared:
            yield 12, (*_POOLS, *(f"layout.{seq}" for seq in sorted(self._shared)))
        if is_late:
            yield 13, _NEW
        if not self._given["by_order"]:
            if any(self._has_repeat(seq) for seq in range(self._cells.sequences)):
                yield 14, _GROUPS
            if any(self._has_gap(ids[0]) for ids in part.ids):
                yield 14, _TAIL
        if any(self._is_tied(seq) for seq in range(self._cells.sequences)):
            yield 15, _GROUPS
        if self._uncomputed.any():
            yield 16, _NEW

    def _edit(self, op: Mapping[str, Any]) -> bool:
        """Carry an edit out; whether it moved cells that another sequence owns too."""
        name, args = op["op"], op.get("args", ())
        if op.get("refuse"):
            return False
        if name == "seq_rm":
            self._cells.remove(*args)
        elif name == "seq_cp" and args[2] <= 0 and args[3] < 0:
            self._cells.copy(*args[:2])
        elif name == "seq_keep":
            self._cells.keep(*args)
        elif name == "clear":
            self._cells.clear()
        elif name in ("seq_add", "seq_div"):
            return self._move(name, *args)
        return False

    def _move(self, name: str, sequence: int, start: int, end: int, by: int) -> bool:
        rows = self._cells.touched(sequence, start, end)
        owners = set(np.flatnonzero(self._cells.members[:, rows].any(axis=1)).tolist())
        others = owners - {sequence}
        self._shared |= others
        is_shift = name == "seq_add"
        self._cells.move(
            sequence, start, end, lambda held: held + by if is_shift else held // by
        )
        return bool(others)

    def _is_late(self, part: Part) -> bool:
        """Whether a sequence gets a token at a position before one that it holds."""
        for seq in part.sequences:
            mine = self._cells.positions[self._cells.members[seq]]
            new = [
                pos for pos, ids in zip(part.positions, part.ids, strict=True) if seq in ids
            ]
            if mine.size and min(new) < mine.max():
                return True
        return False

    def _has_gap(self, sequence: int) -> bool:
        return bool((np.diff(_ranked(self._cells, sequence)[1]) != 1).any())

    def _has_repeat(self, sequence: int) -> bool:
        return bool((np.diff(_ranked(self._cells, sequence)[1]) == 0).any())

    def _is_tied(self, sequence: int) -> bool:
        """Whether cells of one position were not filled in ascending order."""
        rows, positions = _ranked(self._cells, sequence)
        return bool(((np.diff(positions) == 0) & (np.diff(rows) < 0)).any())

    def _meet(self) -> bool:
        """Whether two sequences have pools that end in one row and differ before it."""
        pools = [self._pools(seq) for seq in range(self._cells.sequences)]
        return any(
            one[row] != other[row]
            for one, other in combinations(pools, 2)
            for row in one.keys() & other.keys()
        )

    def _pools(self, sequence: int) -> dict[int, list[int]]:
        """Members of each of the originals' pools by their last row, found one by one."""
        rows, positions = _ranked(self._cells, sequence)
        size, at = self._size, 0
        found = {}
        while at + size <= rows.size:
            run: BoolArray = np.diff(positions[at : at + size]) == 1
            is_pool = bool(run.all()) and (positions[at] - positions[0]) % size == 0
            if is_pool or self._given["by_order"]:
                members = rows[at : at + size].tolist()
                found[members[-1]] = members
                at += size
            else:
                at += 1
        return found


def _ranked(cells: Cells, sequence: int) -> tuple[IntArray, IntArray]:
    """Rows and positions of a sequence, by position and insertion."""
    rows = cells.members[sequence].nonzero()[0]
    rows = rows[np.lexsort((cells.orders[rows], cells.positions[rows]))]
    return rows, cells.positions[rows]
