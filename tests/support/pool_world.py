"""A dictionary of cells that plans pooled steps and judges each plan by what every row holds.

Cells are plain records, pools are found one by one, keys are the members they were made from.
Shares no code with the planner but the types it takes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np

from cachegraph.models.pooled_spec import Grouping, Liveness, PooledSpec, Pooling, QuerySource
from cachegraph.runtime.planners.pool_layout import PoolCells, build_layout
from cachegraph.runtime.planners.pool_lists import pool_lists
from cachegraph.runtime.planners.pool_validate import validate_pool_tokens, validate_pooled
from cachegraph.runtime.planners.pooled import Layouts, PooledPlan, PoolTokens, plan_pooled
from cachegraph.runtime.stale import StaleMarks

Member = tuple[int, int]  # the token's number and its position when the key was made


def pooled_spec(pool: int = 3, grouping: Grouping = Grouping.ORDER) -> PooledSpec:
    return PooledSpec(
        pool=pool,
        budget=2 * pool,
        grouping=grouping,
        pooling=Pooling.MEAN,
        liveness=Liveness.SCORE,
        queries=QuerySource.HIDDEN,
    )


@dataclasses.dataclass
class Cell:
    position: int
    number: int
    owners: set[int]


class PoolWorld:
    """Cells by row, keys by row, layouts and marks. `made`: pools made since the start."""

    def __init__(
        self, spec: PooledSpec, *, sequences: int, size: int = 60, is_unified: bool = True
    ) -> None:
        self.spec = spec
        self.sequences, self.size, self.is_unified = sequences, size, is_unified
        self.cells: dict[int, Cell] = {}
        self.keys: dict[int, tuple[Member, ...]] = {}
        self.layouts: Layouts = {}
        self.stale = StaleMarks(sequences)
        self.made = 0
        self._number = 0

    def view(self) -> PoolCells:
        rows = self.size * (1 if self.is_unified else self.sequences)
        positions, orders = np.full(rows, -1), np.zeros(rows, np.int64)
        members = np.zeros((self.sequences, rows), np.bool_)
        for row, cell in self.cells.items():
            positions[row], orders[row] = cell.position, cell.number
            members[list(cell.owners), row] = True
        return PoolCells(
            positions=positions,
            members=members,
            orders=orders,
            is_unified=self.is_unified,
            cells_per_stream=self.size,
        )

    def of(self, seq: int) -> list[tuple[int, Cell]]:
        """Rows and cells of a sequence, by position and then by insertion."""
        mine = [(row, cell) for row, cell in self.cells.items() if seq in cell.owners]
        return sorted(mine, key=lambda each: (each[1].position, each[1].number))

    def next_position(self, seq: int) -> int:
        held = self.of(seq)
        return held[-1][1].position + 1 if held else 0

    def firsts(self) -> dict[int, int]:
        return {s: self.of(s)[0][1].position for s in range(self.sequences) if self.of(s)}

    def free(self, seq: int) -> list[int]:
        base = 0 if self.is_unified else seq * self.size
        return [row for row in range(base, base + self.size) if row not in self.cells]

    def place(self, positions: Sequence[int], owners: Sequence[tuple[int, ...]]) -> PoolTokens:
        """Give tokens free cells, scattered ones."""
        rows = []
        for position, ids in zip(positions, owners, strict=True):
            free = self.free(ids[0])
            row = free[self._number * 7 % len(free)]
            self.cells[row] = Cell(position, self._number, set(ids))
            self.keys.pop(row, None)
            self._number += 1
            rows.append(row)
        return PoolTokens(
            rows=np.array(rows, np.int64),
            positions=np.array(positions, np.int64),
            owners=tuple(owners),
        )

    def decode(
        self,
        positions: Sequence[int],
        owners: Sequence[tuple[int, ...]],
        *,
        fails: bool = False,
    ) -> PooledPlan:
        """One step, judged; one that fails leaves its tokens in and its keys spoilt."""
        tokens = self.place(positions, owners)
        view = self.view()
        validate_pool_tokens(view, tokens)
        plan = plan_pooled(
            self.spec, view, tokens, layouts=self.layouts, stale=self.stale.marks()
        )
        validate_pooled(self.spec, view, tokens, plan)
        for row, members in zip(plan.new_pool_rep, plan.new_pool_idxs, strict=True):
            self.keys[int(row)] = () if fails else self.key(members.tolist())
        if not fails:
            self.judge(plan, tokens, view)
            self.layouts = plan.layouts
            self.stale.clear(self.stale.marks())
            self.made += plan.new_pools.size
        return plan

    def append(self, seq: int, count: int) -> PooledPlan:
        """Decode the next tokens of a sequence."""
        first = self.next_position(seq)
        return self.decode(range(first, first + count), [(seq,)] * count)

    def key(self, rows: Sequence[int]) -> tuple[Member, ...]:
        return tuple((self.cells[row].number, self.cells[row].position) for row in rows)

    def pools(self, seq: int) -> list[list[int]]:
        """Rows of each pool, found token by token."""
        k, slot, group = self.spec.pool, -1, []
        pools: list[list[int]] = []
        held = self.of(seq)
        for row, cell in held:
            distance = cell.position - held[0][1].position
            is_order = self.spec.grouping is Grouping.ORDER
            following = slot + 1 if is_order else max(slot + 1, distance)
            if following != slot + 1 or following % k == 0:
                group = []
            slot = following
            if group or slot % k == 0:
                group.append(row)
            if len(group) == k:
                pools.append(group)
                group = []
        return pools

    def judge(self, plan: PooledPlan, tokens: PoolTokens, view: PoolCells) -> None:
        """Every layout, list, key and token, against the dictionary."""
        wanted = [(seq, group) for seq in range(self.sequences) for group in self.pools(seq)]
        assert sorted(plan.layouts) == [s for s in range(self.sequences) if self.of(s)]
        for seq, layout in plan.layouts.items():
            assert layout.rows.tolist() == [row for row, _ in self.of(seq)]
            built = build_layout(view, seq, self.spec.pool, self.spec.grouping)
            for field in ("positions", "orders", "rows", "slots", "starts"):
                assert getattr(layout, field).tolist() == getattr(built, field).tolist(), field
            assert layout.resume == built.resume
        assert plan.num_pools == len(wanted)
        present = {seq for owners in tokens.owners for seq in owners}
        lists = pool_lists(self.spec, view, plan, present)
        for at, (seq, group) in enumerate(wanted):
            assert self.keys[int(lists.pool_cells[at])] == self.key(group), (seq, group)
            is_here = self.is_unified or seq in present
            shown = [row % self.size for row in group] if is_here else [self.size] * len(group)
            assert lists.pool_idxs[at].tolist() == shown
        for at, (row, owners) in enumerate(zip(tokens.rows, tokens.owners, strict=True)):
            self._judge_token(plan, at, int(row), owners[0], wanted)

    def _judge_token(
        self,
        plan: PooledPlan,
        at: int,
        row: int,
        seq: int,
        wanted: list[tuple[int, list[int]]],
    ) -> None:
        """It sees the pools of its sequence that end at or before it, and the tail."""
        k = self.spec.pool
        rows = [r for r, _ in self.of(seq)]
        before = rows[: rows.index(row) + 1]
        seen = [n for n, (s, g) in enumerate(wanted) if s == seq and g[-1] in before]
        start, count = int(plan.mask_start[at]), int(plan.mask_n[at])
        assert list(range(start, start + count)) == seen
        left = len(before) % k
        tail = [r % self.size for r in before[len(before) - left :]][::-1]
        assert plan.tail_idxs[at].tolist() == tail + [self.size] * (k - 1 - left)

    def remove(self, seq: int, start: int, end: int) -> None:
        self.stale.removed(seq, start, self.firsts())
        for row, cell in self.of(seq):
            if start <= cell.position < end:
                cell.owners.discard(seq)
                if not cell.owners:
                    del self.cells[row]

    def copy(self, source: int, target: int) -> None:
        """Share the source's cells, or copy them and their keys to the target's stream."""
        self.stale.copied(target)
        if source == target:
            return
        for row, cell in self.of(target):
            cell.owners.discard(target)
            if not cell.owners:
                del self.cells[row]
        for row, cell in self.of(source):
            if self.is_unified:
                cell.owners.add(target)
            else:
                there = row + (target - source) * self.size
                self.cells[there] = dataclasses.replace(cell, owners={target})
                self.keys[there] = self.keys.get(row, ())

    def shift(self, seq: int, start: int, delta: int) -> None:
        """Move positions; every sequence that owns one of the cells is told of it."""
        moved = [cell for _, cell in self.of(seq) if cell.position >= start]
        firsts = self.firsts()
        for owner in {seq}.union(*(cell.owners for cell in moved)):
            self.stale.shifted(owner, start, delta, firsts)
        for cell in moved:
            cell.position += delta


def play(world: PoolWorld, rng: random.Random, length: int) -> None:
    """A random program of appends, late tokens, repeats, failures, removals, copies, shifts."""
    for _ in range(length):
        seq, other = rng.randrange(world.sequences), rng.randrange(world.sequences)
        end = world.next_position(seq)
        start = rng.randint(0, end)
        choice = rng.randrange(10)
        if choice < 5 or not end:
            count = min(rng.randint(1, 8), len(world.free(seq)))
            positions = list(range(end, end + count))
            if choice == 0:
                positions = [end] * count
            elif choice == 1:
                positions = [start] * min(count, 1)
            fails = rng.random() < 0.1
            if positions:
                world.decode(positions, [(seq,)] * len(positions), fails=fails)
        elif choice < 7:
            world.remove(seq, start, rng.choice([end, rng.randint(start, end)]))
        elif choice < 9:
            world.copy(seq, other)
        else:
            world.shift(seq, start, rng.randint(-min(start, 2), 3))
