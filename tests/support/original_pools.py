"""What the originals answer to pooled scenarios, in plain lists, and random scenarios of them.

Written from the record's own words; shares no code with the planners or the replay.
"""

from __future__ import annotations

import random
from typing import Any

Step = dict[str, Any]
Place = tuple[int, int, int]  # positions t, y and x
Pools = list[tuple[int, list[tuple[int, int]]]]  # sequence, (position, cell) of each member


class OriginalPools:
    """Cells [place, ids] of each stream, stale marks, and the layouts last used."""

    def __init__(self, given: Step) -> None:
        self.given = given
        self.k: int = given["kpool"]
        self.size: int = given["kv_size"]
        self.seqs = range(max(1, given["n_seq_max"]))
        count = 1 if given["unified"] else len(self.seqs)
        self.cells: list[list[tuple[Place, set[int]] | None]] = [
            [None] * self.size for _ in range(count)
        ]
        self.heads = [0] * count
        self.stale = [-1] * len(self.seqs)
        self.layouts: dict[int, list[tuple[int, int]]] = {}

    def stream(self, seq: int) -> int:
        return 0 if self.given["unified"] else seq

    def held(self, seq: int) -> list[tuple[int, int]]:
        """(position, cell) of a sequence, sorted."""
        cells = self.cells[self.stream(seq)]
        return sorted((c[0][0], i) for i, c in enumerate(cells) if c and seq in c[1])

    def first(self, seq: int) -> int:
        return self.held(seq)[0][0] if self.held(seq) else -1

    def mark(self, seq: int, position: int) -> None:
        place = 0 if position <= self.first(seq) else max(position, 0)
        old = self.stale[seq]
        self.stale[seq] = place if old < 0 else min(old, place)

    def run(self, op: Step) -> Step:
        handler = getattr(self, op["op"])
        out: Step = {"op": op["op"]} | handler(op)
        return out | {"stale_after": list(self.stale)}

    def seq_rm(self, op: Step) -> Step:
        seq, start, end = op["args"]
        if op.get("refuse"):
            return {"ok": False}
        for each in self.seqs if seq < 0 else (seq,):
            self.mark(each, -1 if seq < 0 else start)
        for each in self.seqs if seq < 0 else (seq,):
            self.edit(each, start, end, lambda place, ids, s=each: (place, ids - {s}))
        return {"ok": True}

    def edit(self, seq: int, start: int, end: int, change: Any) -> None:
        cells = self.cells[self.stream(seq)]
        for i, cell in enumerate(cells):
            if (
                cell
                and seq in cell[1]
                and start <= cell[0][0]
                and (end < 0 or cell[0][0] < end)
            ):
                place, ids = change(*cell)
                cells[i] = (place, ids) if ids and place[0] >= 0 else None

    def seq_cp(self, op: Step) -> Step:
        source, target, start, end = op["args"]
        if start > 0 or end >= 0:
            return {"assert": "partial seq_cp is not supported"}
        self.mark(target, -1)
        one, other = self.stream(source), self.stream(target)
        if one != other:
            self.cells[other] = [
                (c[0], {target}) if c and source in c[1] else None for c in self.cells[one]
            ]
        else:
            self.edit(source, 0, -1, lambda place, ids: (place, ids | {target}))
        return {}

    def seq_keep(self, op: Step) -> Step:
        (kept,) = op["args"]
        self.stale = [0] * len(self.seqs)
        for seq in self.seqs:
            if seq != kept and self.stream(seq) == self.stream(kept):
                self.edit(seq, 0, -1, lambda place, ids, s=seq: (place, ids - {s}))
        return {}

    def seq_add(self, op: Step) -> Step:
        seq, start, end, delta = op["args"]
        self.mark(seq, start + min(0, delta))
        self.edit(seq, start, end, lambda place, ids: ((place[0] + delta, *place[1:]), ids))
        return {}

    def seq_div(self, op: Step) -> Step:
        seq, start, end, divisor = op["args"]
        self.mark(seq, -1)
        self.edit(seq, start, end, lambda place, ids: ((place[0] // divisor, *place[1:]), ids))
        return {}

    def clear(self, op: Step) -> Step:
        self.stale = [0] * len(self.seqs)
        self.cells = [[None] * self.size for _ in self.cells]
        self.heads = [0] * len(self.cells)
        return {}

    def batch(self, op: Step) -> Step:
        before = list(self.stale)
        need: dict[int, int] = {}
        for part in op["ubatches"]:
            for count, ids in part["seq"]:
                stream = self.stream(ids[0])
                need[stream] = need.get(stream, 0) + count
        if any(self.cells[s].count(None) < n for s, n in need.items()):
            return {"stale": before, "status": 2, "ub": []}
        answers = []
        for at, part in enumerate(op["ubatches"]):
            taken = self.take(part)
            answers.append(self.plan(part, taken, self.stale if at == 0 else None))
            if op.get("abort_at") == at:
                answers[-1]["aborted"] = True
                break
            self.stale = [-1] * len(self.seqs)
        return {"stale": before, "status": 0, "ub": answers}

    def take(self, part: Step) -> list[tuple[int, int]]:
        """(stream, cell) of each token: the next free cell from the head on."""
        owners = [ids for count, ids in part["seq"] for _ in range(count)]
        none = [0] * len(owners)
        places = zip(part["pos"], part.get("y", none), part.get("x", none), strict=True)
        taken = []
        for place, ids in zip(places, owners, strict=True):
            stream = self.stream(ids[0])
            cell = self.heads[stream] % self.size
            while self.cells[stream][cell]:
                cell = (cell + 1) % self.size
            self.cells[stream][cell] = (place, set(ids))
            self.heads[stream] = cell + 1
            taken.append((stream, cell))
        return taken

    def pools(self, cells: list[tuple[int, int]]) -> tuple[list[int], int]:
        starts, at, k = [], 0, self.k
        while at + k <= len(cells):
            group = [pos - cells[at][0] for pos, _ in cells[at : at + k]]
            aligned = (cells[at][0] - cells[0][0]) % k == 0 and group == list(range(k))
            if self.given["by_order"] or aligned:
                starts.append(at)
            at += k if starts and starts[-1] == at else 1
        return starts, at

    def plan(self, part: Step, taken: list[tuple[int, int]], stale: list[int] | None) -> Step:
        owners = [ids for count, ids in part["seq"] for _ in range(count)]
        present = list(dict.fromkeys(seq for ids in owners for seq in ids))
        self.layouts = {
            seq: self.layout(seq, part, owners, taken, stale)
            for seq in self.seqs
            if self.held(seq)
        }
        streams = list(dict.fromkeys(stream for stream, _ in taken))
        used = [i for s in streams for i, c in enumerate(self.cells[s]) if c]
        exposed = min(self.size, max(256, -(-(max(used) + 1) // 256) * 256))
        out: Step = {
            "sinfo": {
                "s0": min(streams),
                "s1": max(streams),
                "strm": streams,
                "idxs": [[i for at, i in taken if at == s] for s in streams],
            },
            "n_kv": exposed,
            "n_stream": len(streams),
            "layout": {},
        }
        pools: Pools = []
        begin = {}
        for seq, cells in self.layouts.items():
            starts, resume = self.pools(cells)
            out["layout"][str(seq)] = {
                "strm": self.stream(seq),
                "pos_min": cells[0][0],
                "pos": [pos for pos, _ in cells],
                "cell": [i for _, i in cells],
                "pools": starts,
                "j_next": resume,
            }
            begin[seq] = len(pools)
            pools += [(seq, cells[s : s + self.k]) for s in starts]
        rep = [self.stream(seq) * self.size + group[-1][1] for seq, group in pools]
        new = self.new(pools, rep, owners, taken, stale)
        dummy = min(i for pos, i in self.layouts[owners[0][0]] if pos == part["pos"][0])
        out |= self.padded(pools, rep, present, exposed, taken[0][0] * self.size + dummy)
        out |= self.made(
            pools, rep, new, min(len(owners) // self.k + len(present), self.most(out))
        )
        out |= {"mask_start": [], "mask_n": [], "tail_idxs": []}
        for pos, ids, (_, cell) in zip(part["pos"], owners, taken, strict=True):
            mine = [group for owner, group in pools if owner == ids[0]]
            seen, tail = self.seen(mine, self.layouts[ids[0]], pos, cell, exposed)
            out["mask_n"].append(seen)
            out["mask_start"].append(begin[ids[0]] if seen else 0)
            out["tail_idxs"] += tail + [exposed] * (self.k - 1 - len(tail))
        if self.given["n_sel"]:
            out["sel"] = [self.selected(out, width, exposed) for width in self.given["n_sel"]]
        return out

    def most(self, out: Step) -> int:
        return min(out["n_pool"] - 1, self.size // self.k * len(self.seqs))

    def padded(
        self, pools: Pools, rep: list[int], present: list[int], exposed: int, dummy: int
    ) -> Step:
        count = max(64, -(-(len(pools) + 1) // 64) * 64)
        none = [exposed] * self.k
        is_known = [self.given["unified"] or seq in present for seq, _ in pools]
        shown = [
            [i for _, i in group] if known else none
            for known, (_, group) in zip(is_known, pools, strict=True)
        ]
        shown += [none] * (count - len(pools))
        return {
            "n_pool_real": len(pools),
            "n_pool": count,
            "pool_cells": rep + [dummy] * (count - len(pools)),
            "pool_idxs": [i for group in shown for i in group],
        }

    def made(self, pools: Pools, rep: list[int], new: list[int], bound: int) -> Step:
        count = max(len(new), 1, bound)
        empty = [i for i in range(len(rep) + count) if i not in rep][: count - len(new)]
        rows = [
            [self.stream(pools[p][0]) * self.size + i for _, i in pools[p][1]] for p in new
        ]
        out: Step = {
            "n_new": len(new),
            "n_new_g": count,
            "is_new": new,
            "new_pool_idxs": [
                i for group in rows + [[i] * self.k for i in empty] for i in group
            ],
            "new_pool_rep": [rep[p] for p in new] + empty,
        }
        if self.given["new_pool_pos"]:
            cells = [self.cells[row[0] // self.size][row[0] % self.size] for row in rows]
            firsts = [cell[0] if cell else (0, 0, 0) for cell in cells]
            firsts += [(0, 0, 0)] * len(empty)
            out["new_pool_pos"] = [place[axis] for axis in (0, 1, 2, 0) for place in firsts]
        return out

    def seen(
        self,
        mine: list[list[tuple[int, int]]],
        cells: list[tuple[int, int]],
        pos: int,
        cell: int,
        exposed: int,
    ) -> tuple[int, list[int]]:
        """Pools that a token sees, and its tail."""
        k = self.k
        if self.given["by_order"]:
            rank = cells.index((pos, cell)) + 1
            return rank // k, [i for _, i in cells[rank - rank % k : rank]][::-1]
        by_pos = dict(reversed(cells))
        count = (pos - cells[0][0] + 1) % k
        tail = [by_pos.get(pos - j, exposed) for j in range(count)]
        return sum(group[-1][0] <= pos for group in mine), tail

    def layout(
        self,
        seq: int,
        part: Step,
        owners: list[list[int]],
        taken: list[tuple[int, int]],
        stale: list[int] | None,
    ) -> list[tuple[int, int]]:
        """Kept and appended to unless marked, or its ends or its length are off."""
        held, kept = self.held(seq), self.layouts.get(seq, [])
        listed = zip(part["pos"], owners, taken, strict=True)
        added = sorted((pos, cell) for pos, ids, (_, cell) in listed if seq in ids)
        is_marked = stale is not None and stale[seq] >= 0
        is_late = bool(kept and added and added[0] < kept[-1])
        grown = kept + added
        ends = [grown[0][0], grown[-1][0], len(grown)] if kept else []
        is_off = ends != [held[0][0], held[-1][0], len(held)]
        return held if is_marked or is_off or is_late else grown

    def new(
        self,
        pools: Pools,
        rep: list[int],
        owners: list[list[int]],
        taken: list[tuple[int, int]],
        stale: list[int] | None,
    ) -> list[int]:
        """Pools to make: the stale ones, then those of the tokens; each row once."""
        chosen: dict[int, int] = {}
        for seq, mark in enumerate(stale or []):
            for number, (owner, group) in enumerate(pools):
                if owner == seq and 0 <= mark <= group[-1][0]:
                    chosen.setdefault(rep[number], number)
        for ids, (_, cell) in zip(owners, taken, strict=True):
            for seq in ids:
                for number, (owner, group) in enumerate(pools):
                    if owner == seq and cell in [i for _, i in group]:
                        chosen.setdefault(rep[number], number)
        return sorted(chosen.values())

    def selected(self, out: Step, width: int, exposed: int) -> Step:
        chosen, k = width // self.k * self.k, self.k
        live: list[int] = []
        for token, seen in enumerate(out["mask_n"]):
            count = min(seen * k, chosen)
            live += [1] * count + [0] * (chosen - count)
            tail = out["tail_idxs"][token * (k - 1) : (token + 1) * (k - 1)]
            live += [int(i != exposed) for i in tail[: width - chosen]]
        return {"n_sel": width, "live": live}


def random_record(seed: int) -> Step:
    """A scenario of random operations, the odd ones among them, and the originals' answers."""
    rng = random.Random(seed)
    by_order, many = rng.random() < 0.5, rng.random() < 0.3
    k = rng.choice([3, 4, 4, 5])
    given: Step = {
        "kpool": k,
        "by_order": by_order,
        "unified": rng.random() < 0.6,
        "n_seq_max": rng.randint(1, 4),
        "kv_size": rng.choice([24, 60, 100, 300]),
        "n_pos": 4 if many else 1,
        "n_sel": [2 * k, 3 * k - 1] if rng.random() < 0.5 else [],
        "new_pool_pos": many,
    }
    originals = OriginalPools(given)
    wild = rng.random() < 0.5
    ops, steps = [], []
    for _ in range(rng.randint(3, 14)):
        op = (
            _batch(rng, originals, wild) if rng.random() < 0.6 else _edit(rng, originals, wild)
        )
        ops.append(op)
        steps.append(originals.run(op))
        if "assert" in steps[-1]:
            break
    return {"id": f"r{seed}", "kind": "random", "in": given, "ops": ops, "steps": steps}


def _batch(rng: random.Random, originals: OriginalPools, wild: bool) -> Step:
    seqs = rng.sample(originals.seqs, rng.randint(1, len(originals.seqs)))
    next_pos = {s: max([p for p, _ in originals.held(s)], default=-1) + 1 for s in seqs}
    if rng.random() < 0.1:
        next_pos = {s: p or 7 for s, p in next_pos.items()}
    ubatches = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        count = rng.choice([1, 1, 2, 3, 4, 5, 9, 17])
        is_coupled = originals.given["unified"] and rng.random() < 0.15 and len(seqs) > 1
        part: Step = {"pos": [], "seq": []}
        for seq in seqs[:1] if is_coupled else seqs:
            start = max(next_pos.values()) if is_coupled else next_pos[seq]
            positions = _positions(rng, start, count, wild)
            ids = rng.sample(seqs, len(seqs)) if is_coupled else [seq]
            for each in ids:
                next_pos[each] = max([*positions, next_pos[each] - 1]) + 1
            part["pos"] += positions
            part["seq"].append([len(positions), ids])
        if originals.given["n_pos"] > 1:
            part |= {axis: [rng.randrange(9) for _ in part["pos"]] for axis in ("y", "x")}
        ubatches.append(part)
    op: Step = {"op": "batch", "ubatches": ubatches}
    if rng.random() < 0.06:
        op["abort_at"] = rng.randrange(len(ubatches))
    return op


def _positions(rng: random.Random, start: int, count: int, wild: bool) -> list[int]:
    """Of one sequence: in a row, or with a gap, a repeat, an image, backwards, or too late."""
    plain = list(range(start, start + count))
    choice = rng.randrange(20) if wild else 9
    if choice == 0:
        return [p + (2 if i >= count // 2 else 0) for i, p in enumerate(plain)]
    if choice == 1:
        return [start] * count
    if choice == 2:
        return sorted(plain + plain[:1])
    if choice == 3:
        return plain[::-1]
    if choice == 4:
        return [max(0, start - 3)] * min(count, 2)
    return plain


def _edit(rng: random.Random, originals: OriginalPools, wild: bool) -> Step:
    seq, other = (rng.choice(originals.seqs) for _ in range(2))
    end = max([p for p, _ in originals.held(seq)], default=0) + 1
    start = rng.randrange(end)
    stop = rng.choice([-1, rng.randint(start, end)])
    choice = rng.randrange(12)
    if choice < 4:
        args = rng.choice([[seq, start, -1], [seq, start, stop], [seq, -1, -1], [-1, -1, -1]])
        refuse = {"refuse": True} if rng.random() < 0.05 else {}
        return {"op": "seq_rm", "args": args} | refuse
    if choice < 8:
        first = 1 if wild and rng.random() < 0.05 else -1
        return {"op": "seq_cp", "args": [seq, other, first, -1]}
    if choice == 8:
        return {"op": "seq_keep", "args": [seq]}
    if choice == 9:
        return {"op": "seq_add", "args": [seq, start, stop, rng.randint(-4, 4)]}
    if choice == 10 and wild:
        return {"op": "seq_div", "args": [seq, start, -1, 2]}
    return (
        {"op": "seq_rm", "args": [seq, start, -1]} if rng.random() < 0.8 else {"op": "clear"}
    )
