"""Levels `prepare` and `ckpt`: random scenarios, and the right answer for each fault on purpose."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.original_checkpoints import Originals, random_record

from cachegraph.tools.conformance.checkpoint_rules import checkpoint_rules
from cachegraph.tools.conformance.checkpoints import Replayer
from cachegraph.tools.conformance.prepared import parse_prepared, prepare, prepared_rules
from cachegraph.tools.conformance.report import LEVELS, judge, run_vectors
from cachegraph.tools.conformance.scenario import load_scenarios

pytestmark = pytest.mark.r0

VECTORS = Path(__file__).parents[1] / "data" / "dsv4_plan.json"
SAVE, INIT = {"op": "save", "use_gpu": True}, {"op": "init", "mode": 1, "max_tokens": 8}
Op = dict[str, Any]
Prepared = Callable[[str], dict[str, Any]]


def decode(start: int, count: int, seqs: tuple[int, ...] = (0,), coupled: bool = False) -> Op:
    """The next `count` tokens of each sequence, or of all of them together."""
    places = [(p, [s]) for s in seqs for p in range(start, start + count)]
    if coupled:
        places = [(p, list(seqs)) for p in range(start, start + count)]
    cells = [[slot, position, 1, ids] for slot, (position, ids) in enumerate(places)]
    batch = {"n_tokens": len(places), "pos": [p for p, _ in places]}
    return {
        "op": "decode",
        "kv": {"size": 64, "head": 0, "cells": cells, "compact": None},
        "batch": batch | {"seq": [[1, ids] for _, ids in places]},
    }


def restore(accepted_step: int, use_gpu: bool = True) -> Op:
    return {"op": "restore", "use_gpu": use_gpu, "accepted_step": accepted_step}


def record(*ops: Op, streams: int = 1) -> dict[str, Any]:
    given = {"n_seq_max": streams, "n_ctx": 1024, "model": {"ratios": [4, 128]}, "ops": ops}
    originals = Originals(streams)
    steps = [originals.run(op) for op in ops]
    return {
        "id": "made",
        "kind": "made",
        "level": "ckpt",
        "in": given,
        "out": {"steps": steps},
    }


def ours(made: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, int]]:
    """Our last answer, and the CSA state rows after it."""
    last = Replayer(made).run()[-1]
    return last, dict(last["state"]["csa"])


def deviations(made: Mapping[str, Any]) -> tuple[int, ...]:
    difference, rules = judge(made, LEVELS["ckpt"](made))
    assert difference is None
    return rules


@pytest.mark.parametrize("seed", range(40))
def test_random_scenarios_match_or_deviate_by_rule_11(seed: int) -> None:
    assert deviations(random_record(seed)) in ((), (11,))


def test_scenarios_without_a_named_fault_have_no_rule() -> None:
    made = record(INIT, SAVE, decode(0, 3), restore(1), decode(2, 1, (1,)), streams=2)
    assert [rule.number for rule, _ in checkpoint_rules(made)] == [11]  # a second decode
    assert checkpoint_rules(record(INIT, SAVE, decode(0, 3), restore(1))) == []


def test_rule_11_several_decodes_of_one_save_are_kept() -> None:
    """Two tokens, then three, of which one is accepted: the first two stay."""
    made = record(INIT, SAVE, decode(0, 2), decode(2, 3), restore(0))
    answer, rows = ours(made)
    assert answer["result"] == 1
    assert rows == {0: 1000, 1: 1001, 2: 2000}
    assert deviations(made) == (11,)


def test_rule_11_tokens_after_a_restore_count_on_from_it() -> None:
    made = record(INIT, SAVE, decode(0, 4), restore(1), decode(2, 3), restore(0))
    assert ours(made)[1] == {0: 1000, 1: 1001, 2: 2000}
    assert deviations(made) == (11,)


def test_rule_11_every_sequence_of_a_coupled_token_is_recorded() -> None:
    made = record(INIT, SAVE, decode(0, 3, (0, 1), coupled=True), restore(1), streams=2)
    assert ours(made)[1] == {0: 1000, 1: 1001, 8: 1000, 9: 1001}
    assert deviations(made) == (11,)


def test_rule_11_the_limit_counts_tokens_of_a_sequence() -> None:
    """Five tokens of each of two sequences: ten batch rows, five of a sequence."""
    made = record(INIT, SAVE, decode(0, 5, (0, 1)), restore(5), streams=2)
    steps = Replayer(made).run()
    assert steps[2]["capture_ok"] is True
    assert ours(made)[1] == {0: 1000, 1: 1001, 2: 1002, 3: 1003, 4: 1004, 8: 1005}
    assert deviations(made) == (11,)


def test_rule_11_growing_keeps_the_save() -> None:
    small, large = INIT | {"max_tokens": 2}, INIT
    made = record(small, SAVE, decode(0, 2), large, restore(0))
    answer, rows = ours(made)
    assert (answer["result"], rows) == (1, {0: 1000})
    assert deviations(made) == (11,)


@pytest.mark.parametrize("without", ["room", "device"])
def test_rule_11_a_failed_capture_restores_nothing(without: str) -> None:
    lost = [{"op": "backend", "present": False}] if without == "device" else []
    made = record(INIT, SAVE, *lost, decode(0, 9 if without == "room" else 2), restore(0))
    steps = Replayer(made).run()
    assert steps[-2]["capture_ok"] is False
    assert steps[-1]["result"] == 0
    assert steps[-1]["state"] == steps[-2]["state"]
    assert deviations(made) == (11,)


def test_rule_11_a_decode_under_another_mode_is_recorded_too() -> None:
    other = {"op": "init", "mode": 3, "max_tokens": 8}
    made = record(INIT, SAVE, other, decode(0, 2), INIT, restore(0))
    assert ours(made)[1] == {0: 1000}
    assert deviations(made) == (11,)


def test_rule_7_a_refused_decode_records_nothing() -> None:
    made = record(INIT, SAVE, decode(0, 2), SAVE, restore(0))
    broken = decode(2, 2)
    broken["batch"]["pos"] = [-1, 2]
    made["in"]["ops"] = [INIT, SAVE, decode(0, 2), broken, restore(0)]
    steps = Replayer(made).run()
    assert steps[3]["prepare_ok"] is False
    assert dict(steps[4]["state"]["csa"]) == {0: 1000}
    assert {rule.number for rule, _ in checkpoint_rules(made)} == {7}


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, Any]:
    """The recorded scenarios by id."""
    return {record["id"]: record for record in load_scenarios(VECTORS)}


@pytest.fixture
def prepared(recorded: Mapping[str, Any]) -> Prepared:
    """A copy of a recorded scenario, to be changed."""
    return lambda name: copy.deepcopy(dict(recorded[name]))


def test_a_predictor_pass_gets_a_raw_plan_only(prepared: Prepared) -> None:
    made = prepared("p0645")
    made["in"]["reserve"] = False
    out = prepare(parse_prepared(made, made["in"]))
    assert out["raw"]["write_dst_idxs"] == [0, 1, 2]
    assert out["csa"]["state_pos"] == []
    assert (out["csa_n_kv"], out["sizes"]["csa_kv"]) == (0, 0)


def test_rule_3_unequal_counts_are_prepared(prepared: Prepared) -> None:
    made = prepared("p0629")
    out = prepare(parse_prepared(made, made["in"]))
    assert out["ok"]
    assert out["raw"]["read_counts"] == [6, 9]
    assert out["lid"] == out["csa"]


def test_rule_9_reserve_counts_each_sequence_and_looks_at_no_positions(
    prepared: Prepared,
) -> None:
    made = prepared("p0614")
    wanted = prepare(parse_prepared(made, made["in"]))
    made["in"]["batch"]["pos"] = [-1] * 5
    case = parse_prepared(made, made["in"])
    assert prepare(case) == wanted
    assert prepared_rules(case) == []
    ids = [[4, [0]], [1, [1]]]
    made["in"] |= {"n_seq_max": 2, "batch": made["in"]["batch"] | {"seq": ids}}
    assert len(prepare(parse_prepared(made, made["in"]))["csa"]["state_write_idxs"]) == 2
    made["in"]["batch"] |= {"n_tokens": 6, "pos": [0] * 6, "seq": [[5, [0]], [1, [1]]]}
    case = parse_prepared(made, made["in"])
    assert len(prepare(case)["csa"]["state_write_idxs"]) == 3
    assert [rule.number for rule, _ in prepared_rules(case)] == [9]


def test_rule_10_a_model_without_hca_is_prepared(prepared: Prepared) -> None:
    made = prepared("p0613")
    made["in"]["model"]["ratios"] = [0, 4]
    case = parse_prepared(made, made["in"])
    out = prepare(case)
    assert out["ok"]
    assert out["hca"]["state_pos"] == []
    assert (out["sizes"]["hca_kv"], out["sizes"]["csa_kv"]) == (0, 256)
    assert 10 in {rule.number for rule, _ in prepared_rules(case)}


def test_a_wrong_state_is_one_line_and_a_failure(tmp_path: Path, prepared: Prepared) -> None:
    made = prepared("p0661")
    made["out"]["steps"][-1]["state"]["hca"][-1][1] += 1
    file = tmp_path / "vectors.json"
    file.write_text(json.dumps({"scenarios": [made]}))
    report = run_vectors(file)
    lines = list(report.lines())
    assert lines[0].startswith("p0661 checkpoint steps[4].state.hca: got ")
    assert lines[-1] == "0 match, 1 differ, 0 deviate on purpose"
    assert not report.is_ok
