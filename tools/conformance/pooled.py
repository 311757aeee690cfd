"""Our pooled plans in the recorded form: level `pooled`.

Owns the recorded padding: pools to a multiple of 64 with one spare at least, exposed cells to a
multiple of 256, new pools to the bound of a step, padding that names unused cells. A refusal of
ours is `refused`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from cachegraph.models.errors import PlanError
from cachegraph.models.pooled_spec import (
    Grouping,
    Liveness,
    PooledSpec,
    Pooling,
    QuerySource,
    cache_pools,
    new_pools,
)
from cachegraph.runtime.planners.pool_layout import PoolLayout
from cachegraph.runtime.planners.pool_lists import PoolLists, pool_lists
from cachegraph.runtime.planners.pool_validate import validate_pool_tokens, validate_pooled
from cachegraph.runtime.planners.pooled import PooledPlan, PoolTokens, plan_pooled
from cachegraph.runtime.stale import StaleMarks
from cachegraph.tools.conformance.pooled_cells import EMPTY, Cells, Part, parse_parts

POOL_PAD = 64
CELL_PAD = 256
NOT_OURS = ("incoherent", "layout_off", "errors")  # notes of the record, and texts


def pooled_spec(given: Mapping[str, Any]) -> PooledSpec:
    """The planner's choices of a scenario; what only a builder reads follows the grouping."""
    by_order = given["by_order"]
    return PooledSpec(
        pool=given["kpool"],
        budget=given["kpool"],
        grouping=Grouping.ORDER if by_order else Grouping.POSITION,
        pooling=Pooling.MEAN if by_order else Pooling.GATED,
        liveness=Liveness.SCORE if by_order else Liveness.COUNT,
        queries=QuerySource.HIDDEN if by_order else QuerySource.LATENT,
        has_places=given["n_pos"] > 1,
    )


class PooledReplayer:
    """Cells, layouts and stale marks of one scenario."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self._given = record["in"]
        self.spec = pooled_spec(self._given)
        self.cells = Cells(self._given)
        self.stale = StaleMarks(self.cells.sequences)
        self.layouts: Mapping[int, PoolLayout] = {}

    def run(self) -> list[dict[str, Any]]:
        """What each recorded operation answers."""
        handlers = {
            "batch": self._batch,
            "seq_rm": self._remove,
            "seq_cp": self._copy,
            "seq_keep": self._keep,
            "seq_add": self._shift,
            "seq_div": self._divide,
            "clear": self._clear,
            "full": self._full,
        }
        steps = self._record["steps"]
        ops = self._record["ops"][: len(steps)]
        return [
            {"op": op["op"]} | handlers[op["op"]](op, step) | {"stale_after": self._marks()}
            for op, step in zip(ops, steps, strict=True)
        ]

    def _marks(self) -> list[int]:
        marks = self.stale.marks()
        return [marks.get(seq, -1) for seq in range(self.cells.sequences)]

    def _batch(self, op: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {"stale": self._marks()}
        parts = parse_parts(op, step)
        before = (copy.deepcopy(self.cells), copy.deepcopy(self.stale), self.layouts)
        try:
            self._check_ids(parts)
            if not self.cells.has_room(parts):
                return out | {"status": 2, "ub": []}
            if parts[0].cells is None:
                return out | {"status": "no recorded cells"}
            return out | {"status": 0, "ub": self._ubatches(parts, op.get("abort_at"))}
        except PlanError:
            self.cells, self.stale, self.layouts = before
            return out | {"refused": True}

    def _ubatches(self, parts: list[Part], aborted: int | None) -> list[dict[str, Any]]:
        answers = []
        for at, part in enumerate(parts):
            self.cells.place(part)
            plan = self.plan(part)
            answers.append(self._answer(part, plan))
            if at == aborted:
                answers[-1]["aborted"] = True
                break
            self.commit(plan)
        return answers

    def plan(self, part: Part) -> PooledPlan:
        """The validated plan of a ubatch whose cells are placed."""
        view = self.cells.view()
        rows = self.cells.rows(part)
        tokens = PoolTokens(rows=rows, positions=part.positions, owners=part.owners)
        validate_pool_tokens(view, tokens)
        marks = self.stale.marks()
        plan = plan_pooled(self.spec, view, tokens, layouts=self.layouts, stale=marks)
        validate_pooled(self.spec, view, tokens, plan)
        return plan

    def commit(self, plan: PooledPlan) -> None:
        """The ubatch was computed."""
        self.layouts = plan.layouts
        self.stale.clear(self.stale.marks())

    def _check_ids(self, parts: list[Part]) -> None:
        """What is refused before cells are reserved."""
        if self._given.get("n_swa"):
            raise PlanError("pooled keys with a sliding window, whose cells free themselves")
        known = range(self.cells.sequences)
        if not all(ids and all(seq in known for seq in ids) for p in parts for ids in p.ids):
            raise PlanError("a token belongs to no sequence, or to one out of range")

    def _remove(self, op: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        sequence, start, end = op["args"]
        if op.get("refuse"):
            return {"ok": False}
        self.stale.removed(sequence, start, self.cells.firsts())
        self.cells.remove(sequence, start, end)
        return {"ok": True}

    def _copy(self, op: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        source, target, start, end = op["args"]
        if start > 0 or end >= 0:
            return {"refused": True}
        self.stale.copied(target)
        self.cells.copy(source, target)
        return {}

    def _keep(self, op: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        self.stale.reset()
        self.cells.keep(op["args"][0])
        return {}

    def _shift(self, op: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        sequence, start, end, delta = op["args"]
        firsts = self.cells.firsts()
        for seq in (sequence, *self.sharers(sequence, start, end)):
            self.stale.shifted(seq, start, delta, firsts)
        self.cells.move(sequence, start, end, lambda positions: positions + delta)
        return {}

    def _divide(self, op: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        sequence, start, end, divisor = op["args"]
        for seq in (sequence, *self.sharers(sequence, start, end)):
            self.stale.replaced(seq)
        self.cells.move(sequence, start, end, lambda positions: positions // divisor)
        return {}

    def sharers(self, sequence: int, start: int, end: int) -> list[int]:
        """Other sequences that own one of a sequence's cells in a range."""
        rows = self.cells.touched(sequence, start, end)
        owners = np.flatnonzero(self.cells.members[:, rows].any(axis=1)).tolist()
        return [seq for seq in owners if seq != sequence]

    def _clear(self, op: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        self.stale.reset()
        self.cells.clear()
        return {}

    def _full(self, op: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
        real = sum(layout.num_pools for layout in self.layouts.values())
        count = max(1, real, self._limit)
        return {
            "n_kpool": padded_pools(count),
            "n_kpool_new": count,
            "n_kv": self.cells.size,
            "n_stream": 1 if self.cells.is_unified else self.cells.sequences,
        }

    @property
    def _limit(self) -> int:
        return cache_pools(self.spec.pool, self.cells.size, self.cells.sequences)

    def _answer(self, part: Part, plan: PooledPlan) -> dict[str, Any]:
        streams = self.cells.streams(part)
        num_pools = padded_pools(plan.num_pools)
        exposed = self._exposed(streams)
        new = plan.new_pools.size
        limit = min(num_pools - 1, self._limit)
        bound = new_pools(self.spec.pool, part.positions.size, len(part.sequences), limit)
        tail = np.where(plan.tail_idxs == plan.sentinel, exposed, plan.tail_idxs)
        out = {
            "sinfo": {
                "s0": min(streams),
                "s1": max(streams),
                "strm": streams,
                "idxs": part.cells,
            },
            "n_kv": exposed,
            "n_stream": len(streams),
            "layout": {str(seq): self._layout(seq, plan) for seq in plan.layouts},
            "n_pool_real": plan.num_pools,
            "n_new": new,
            "n_new_g": max(new, bound),
            "n_pool": num_pools,
            "is_new": plan.new_pools.tolist(),
            "tail_idxs": tail.ravel().tolist(),
            "mask_start": plan.mask_start.tolist(),
            "mask_n": plan.mask_n.tolist(),
        }
        present = {seq for ids in part.owners for seq in ids}
        lists = pool_lists(self.spec, self.cells.view(), plan, present)
        out |= self._pools(part, plan, lists, num_pools, exposed)
        out |= self._new(plan, lists, max(new, bound))
        if self._given["n_sel"]:
            out["sel"] = [self._selected(plan, width) for width in self._given["n_sel"]]
        return out

    def _exposed(self, streams: list[int]) -> int:
        used = (self.cells.positions != EMPTY).reshape(-1, self.cells.size)[streams]
        highest = int(used.any(axis=0).nonzero()[0].max())
        return min(self.cells.size, max(CELL_PAD, -(-(highest + 1) // CELL_PAD) * CELL_PAD))

    def _layout(self, sequence: int, plan: PooledPlan) -> dict[str, Any]:
        layout = plan.layouts[sequence]
        stream = self.cells.stream(sequence)
        return {
            "strm": stream,
            "pos_min": int(layout.positions[0]),
            "pos": layout.positions.tolist(),
            "cell": (layout.rows - stream * self.cells.size).tolist(),
            "pools": layout.starts.tolist(),
            "j_next": layout.resume,
        }

    def _pools(
        self, part: Part, plan: PooledPlan, lists: PoolLists, count: int, exposed: int
    ) -> dict[str, Any]:
        """Padding pools: the dummy cell, and members that stand for none."""
        sequence = part.ids[0][0]
        layout = plan.layouts[sequence]
        same = layout.rows[layout.positions == part.positions[0]]
        fill = count - plan.num_pools
        members = np.where(lists.pool_idxs == plan.sentinel, exposed, lists.pool_idxs)
        return {
            "pool_cells": lists.pool_cells.tolist() + [int(same.min())] * fill,
            "pool_idxs": members.ravel().tolist() + [exposed] * (fill * self.spec.pool),
        }

    def _new(self, plan: PooledPlan, lists: PoolLists, count: int) -> dict[str, Any]:
        """Padding entries: cells in which no pool's key lies, one each."""
        fill = count - plan.new_pools.size
        used = set(lists.pool_cells.tolist())
        unused = [row for row in range(count + len(used)) if row not in used][:fill]
        members = [row for row in unused for _ in range(self.spec.pool)]
        out: dict[str, Any] = {
            "new_pool_idxs": plan.new_pool_idxs.ravel().tolist() + members,
            "new_pool_rep": plan.new_pool_rep.tolist() + unused,
        }
        if self._given["new_pool_pos"]:
            places = np.zeros((count, 3), np.int64)
            places[: plan.new_pools.size] = plan.new_pool_pos
            out["new_pool_pos"] = places[:, [0, 1, 2, 0]].T.ravel().tolist()
        return out

    def _selected(self, plan: PooledPlan, width: int) -> dict[str, Any]:
        """Which entries of each token's selection are live: chosen pools, then the tail."""
        size = self.spec.pool
        chosen = width // size * size
        live = np.zeros((plan.k_idxs.size, width), np.int64)
        visible = np.minimum(plan.mask_n * size, chosen)
        live[:, :chosen] = np.arange(chosen) < visible[:, None]
        live[:, chosen:] = plan.tail_idxs[:, : width - chosen] != plan.sentinel
        return {"n_sel": width, "live": live.ravel().tolist()}


def padded_pools(count: int) -> int:
    """The originals' number of pools: one at least is padding."""
    return max(POOL_PAD, -(-(count + 1) // POOL_PAD) * POOL_PAD)


def recorded_pooled(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The recorded steps as they are compared: an assert is a refusal, notes are left out."""
    return [_recorded(step) for step in record["steps"]]


def _recorded(step: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in step.items() if name not in NOT_OURS}
    if "ub" in kept:
        kept["ub"] = [
            {name: value for name, value in part.items() if name not in NOT_OURS}
            for part in kept["ub"]
        ]
    if "assert" in kept:
        kept = {name: kept[name] for name in ("op", "stale", "stale_after") if name in kept}
        kept["refused"] = True
    return kept
