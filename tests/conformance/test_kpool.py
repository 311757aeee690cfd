"""The pooled index: recorded and random scenarios, and the right answer for each fault."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.original_pools import OriginalPools, random_record

from cachegraph.runtime.planners.pooled import PooledPlan
from cachegraph.tools.conformance.pooled import PooledReplayer
from cachegraph.tools.conformance.pooled_rules import POOLED_RULES, pooled_rules
from cachegraph.tools.conformance.report import (
    LEVELS,
    POOLED,
    VectorReport,
    judge,
    run_vectors,
)
from cachegraph.tools.conformance.scenario import load_scenarios

pytestmark = pytest.mark.r0

VECTORS = Path(__file__).parents[1] / "data" / "kpool_plan.json"
Op = dict[str, Any]
Key = tuple[tuple[int, int], ...]


class Coherent(PooledReplayer):
    """A replay that keeps what each row's key was made from, and checks every key that is read."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        super().__init__(record)
        self.keys: dict[int, Key] = {}
        self.num_read = 0

    def _key(self, rows: list[int]) -> Key:
        return tuple((int(self.cells.orders[r]), int(self.cells.positions[r])) for r in rows)

    def commit(self, plan: PooledPlan) -> None:
        super().commit(plan)
        for row in plan.k_idxs.tolist():
            self.keys.pop(row, None)
        for rep, members in zip(plan.new_pool_rep, plan.new_pool_idxs.tolist(), strict=True):
            self.keys[int(rep)] = self._key(members)
        for layout in plan.layouts.values():
            pools = layout.members(self.spec.pool).tolist()
            for rep, members in zip(layout.reps.tolist(), pools, strict=True):
                assert self.keys[rep] == self._key(members)
                self.num_read += 1


@pytest.fixture(scope="module")
def records() -> list[Mapping[str, Any]]:
    return load_scenarios(VECTORS)


@pytest.fixture(scope="module")
def report() -> VectorReport:
    return run_vectors(VECTORS)


def test_every_recorded_scenario_matches_or_deviates_by_rule(report: VectorReport) -> None:
    lines = list(report.lines())
    assert report.is_ok, lines
    assert lines[-1] == "134 match, 0 differ, 29 deviate on purpose"
    assert not any("not run" in line for line in lines)


def test_every_rule_but_two_is_met_by_a_recorded_scenario(report: VectorReport) -> None:
    """Rules 17 (ids out of range) and 20 (other histories) are met by none of this file."""
    used = {number for _, numbers in report.deviations for number in numbers}
    assert used == {rule.number for rule in POOLED_RULES} - {17, 20}


def test_no_stale_key_is_ever_read(records: list[Mapping[str, Any]]) -> None:
    """Where the originals read one, in 22 ubatches of this file, ours does not."""
    faulty = [
        part
        for record in records
        for step in record["steps"]
        for part in step.get("ub", [])
        if "incoherent" in part
    ]
    assert len(faulty) == 22
    num_read = 0
    for record in records:
        replay = Coherent(record)
        replay.run()
        num_read += replay.num_read
    assert num_read == 2847


@pytest.mark.parametrize("block", range(5))
def test_random_scenarios_match_or_deviate_by_rule(block: int) -> None:
    for seed in range(block * 30, (block + 1) * 30):
        made = random_record(seed)
        difference, _ = judge(made, LEVELS[POOLED](made))
        assert difference is None, seed
        Coherent(made).run()


def test_a_wrong_number_is_one_line_and_a_failure(
    tmp_path: Path, records: list[Mapping[str, Any]]
) -> None:
    made = json.loads(json.dumps(next(r for r in records if r["kind"] == "single")))
    made["steps"][1]["ub"][0]["tail_idxs"][0] += 1
    made["steps"][2]["ub"][0]["layout"]["0"]["j_next"] += 1
    file = tmp_path / "vectors.json"
    file.write_text(json.dumps({"scenarios": [made]}))
    report = run_vectors(file)
    lines = list(report.lines())
    assert lines[0].startswith("k0000 single steps[1].ub[0].tail_idxs: got ")
    assert lines[0].endswith("(and 1 more fields)")
    assert lines[-1] == "0 match, 1 differ, 0 deviate on purpose"


def scenario(*ops: Op, **given: Any) -> dict[str, Any]:
    """A scenario of made-up operations with the originals' answers."""
    sizes: dict[str, Any] = {
        "kpool": 3,
        "by_order": True,
        "unified": True,
        "n_seq_max": 3,
        "kv_size": 30,
        "n_pos": 1,
        "n_sel": [],
        "new_pool_pos": False,
    }
    given = sizes | given
    originals = OriginalPools(given)
    steps = [originals.run(op) for op in ops]
    return {"id": "made", "kind": "made", "in": given, "ops": list(ops), "steps": steps}


def batch(*parts: tuple[list[int], list[int]], **more: Any) -> Op:
    """One ubatch: positions and their ids, part by part."""
    positions = [position for part, _ in parts for position in part]
    owners = [[len(part), ids] for part, ids in parts]
    return {"op": "batch", "ubatches": [{"pos": positions, "seq": owners}]} | more


def edit(name: str, *args: int) -> Op:
    return {"op": name, "args": list(args)}


def ours(made: dict[str, Any]) -> list[dict[str, Any]]:
    """Our answers, every key read a fresh one, and all of them covered by rules."""
    difference, _ = judge(made, LEVELS[POOLED](made))
    assert difference is None
    steps = Coherent(made).run()
    return [step | (step["ub"][-1] if step.get("ub") else {}) for step in steps]


def numbers(made: dict[str, Any]) -> tuple[int, ...]:
    return judge(made, LEVELS[POOLED](made))[1]


NINE = batch((list(range(9)), [0]))
COPY = edit("seq_cp", 0, 1, -1, -1)


def test_rule_12_pools_that_meet_in_a_row_get_a_row_each() -> None:
    """Rows 0..8; the copy has lost 1..3, so that {0, 4, 5} would end where {3, 4, 5} does."""
    made = scenario(NINE, COPY, edit("seq_rm", 1, 1, 4), batch(([9], [0])))
    last = ours(made)[-1]
    assert last["pool_cells"][:5] == [2, 5, 8, 4, 8]
    assert last["is_new"] == [3, 4]
    assert last["new_pool_idxs"][:6] == [0, 4, 5, 6, 7, 8]
    assert made["steps"][-1]["ub"][0]["pool_cells"][:5] == [2, 5, 8, 5, 8]
    assert numbers(made) == (12,)


def test_rule_12_a_shift_of_shared_cells_stales_their_sequences() -> None:
    made = scenario(
        NINE, COPY, batch(([0], [2])), edit("seq_add", 0, 3, -1, 2), batch(([11], [1]))
    )
    *_, shift, last = ours(made)
    assert shift["stale_after"] == [3, 3, -1]
    assert last["layout"]["1"]["pos"] == [0, 1, 2, *range(5, 12)]
    assert last["is_new"] == [1, 2]
    assert made["steps"][-2]["stale_after"] == [3, -1, -1]
    assert numbers(made) == (12,)


def test_rule_13_what_a_late_token_regroups_is_pooled_again() -> None:
    made = scenario(batch(([0, 1, 3, 4, 5, 6], [0])), batch(([2], [0])))
    last = ours(made)[-1]
    assert last["new_pool_idxs"][:6] == [0, 1, 6, 2, 3, 4]
    assert made["steps"][-1]["ub"][0]["is_new"] == [0]
    assert numbers(made) == (13,)


def test_rule_14_a_group_with_a_hole_has_no_pool() -> None:
    """Position 4 is missing; the tail holds what is left of the tokens up to each one."""
    made = scenario(batch(([0, 1, 2, 3, 5, 6, 7, 8], [0])), by_order=False)
    last = ours(made)[-1]
    assert last["layout"]["0"]["pools"] == [0, 5]
    assert last["mask_n"] == [0, 0, 1, 1, 1, 1, 1, 2]
    tails = [last["tail_idxs"][at : at + 2] for at in range(0, 16, 2)]
    assert tails == [[0, 30], [1, 0], [30, 30], [3, 30], [4, 3], [30, 30], [6, 30], [7, 6]]
    assert numbers(made) == (14,)


def test_rule_14_a_repeat_takes_a_slot_of_its_own() -> None:
    made = scenario(batch(([0, 1, 1, 2, 3, 4, 5], [0])), by_order=False)
    last = ours(made)[-1]
    assert last["layout"]["0"]["pools"] == [0, 3]
    assert last["mask_n"] == [0, 0, 1, 1, 1, 2, 2]
    assert last["tail_idxs"][-2:] == [6, 30]
    assert made["steps"][-1]["ub"][0]["layout"]["0"]["pools"] == [4]
    assert numbers(made) == (14,)


def test_rule_15_equal_positions_rank_by_insertion() -> None:
    """The second half of an image takes cells below the first half's."""
    first, second = batch(([0, 0], [1]), ([0, 1, 1], [0])), batch(([1, 1, 1], [0]))
    made = scenario(first, edit("seq_rm", 1, -1, -1), second, kv_size=6)
    last = ours(made)[-1]
    assert last["layout"]["0"]["cell"] == [2, 3, 4, 5, 0, 1]
    assert last["is_new"] == [1]
    assert numbers(made) == (15,)


def test_rule_16_a_pool_of_a_dropped_batch_is_made_by_the_next() -> None:
    made = scenario(batch(([0, 1], [0])), batch(([2], [0]), abort_at=0), batch(([3], [0])))
    last = ours(made)[-1]
    assert last["new_pool_idxs"][:3] == [0, 1, 2]
    assert made["steps"][-1]["ub"][0]["n_new"] == 0
    assert numbers(made) == (16,)


@pytest.mark.parametrize("ids", [[], [3], [-1], [0, 7]])
def test_rule_17_invalid_ids_are_refused(ids: list[int]) -> None:
    made = scenario(batch(([0], [0])), batch(([1], [0])))
    made["ops"][1] = batch(([1], ids))
    refused = ours(made)[-1]
    assert refused["refused"]
    assert refused["stale_after"] == [-1, -1, -1]
    assert numbers(made) == (17,)


def test_rule_18_an_id_listed_twice_counts_once() -> None:
    made = scenario(batch((list(range(4)), [0])))
    made["ops"][0] = batch((list(range(4)), [0, 0]))
    assert ours(made)[-1]["is_new"] == [0]
    assert numbers(made) == ()


def test_rule_19_a_sliding_window_is_refused() -> None:
    made = scenario(batch(([0], [0])))
    made["in"]["n_swa"] = 8
    assert ours(made)[-1]["refused"]
    assert numbers(made) == (19,)


def test_rule_20_coupled_tokens_need_one_history() -> None:
    """After the refusal everything stands as before it."""
    together = batch((list(range(3)), [0, 1]))
    made = scenario(together, batch(([3], [1])), batch(([4], [0, 1])), batch(([4], [1])))
    steps = ours(made)
    assert steps[0]["is_new"] == [0]
    assert steps[2] == {
        "op": "batch",
        "stale": [-1] * 3,
        "refused": True,
        "stale_after": [-1] * 3,
    }
    assert steps[3]["layout"]["1"]["cell"] == [0, 1, 2, 3, 5]
    assert numbers(made) == (20,)


def test_the_notes_of_the_originals_faults_are_foreseen(
    records: list[Mapping[str, Any]],
) -> None:
    """Every scenario in which they read a stale key, or keep a layout that is off, has a rule."""
    for record in records:
        parts = [part for step in record["steps"] for part in step.get("ub", [])]
        if any("incoherent" in part or "layout_off" in part for part in parts):
            assert pooled_rules(record), record["id"]
