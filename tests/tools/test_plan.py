"""`cachegraph plan`: the plan that an engine would run, from the manifest alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import Bundles, open_engine
from support.engines import watched

from cachegraph.models.capacity import Capacity
from cachegraph.models.manifest import read_manifest
from cachegraph.runtime.batch import Batch
from cachegraph.tools.plan_steps import plan_steps
from cachegraph.tools.plan_text import short

pytestmark = pytest.mark.r1
Run = Callable[..., tuple[int, str, str]]
VECTORS = Path(__file__).parents[1] / "data" / "dsv4_plan.json"


@pytest.fixture
def bundle(bundles: Bundles) -> Path:
    """Window 7, ratios 4 and 12, steps of 1, 4 and 6 tokens, three sequences."""
    capacity = Capacity(context=50, sequences=3, max_step=6, rewind=0)
    return bundles.bundle(bundles.checkpoint(), capacity=capacity)


@pytest.fixture
def bare(bundle: Path, tmp_path: Path) -> Path:
    """A folder with a manifest and nothing else."""
    (tmp_path / "bare").mkdir()
    shutil.copyfile(bundle / "manifest.json", tmp_path / "bare" / "manifest.json")
    return tmp_path / "bare"


def test_the_plan_is_what_an_engine_runs(bundle: Path) -> None:
    sizes, manifest = (11, 1, 2, 13), read_manifest(bundle)
    planned = list(plan_steps(manifest, sizes, 2))
    with open_engine(bundle) as engine, watched(engine) as calls:
        for size, step in zip(sizes, planned, strict=True):
            calls.clear()
            starts = {seq: engine.length(seq) for seq in range(2)}
            tokens = np.arange(2 * size) % manifest.vocab_size
            engine.decode(Batch.of(tokens, None, [0] * size + [1] * size, starts=starts))
            assert len(calls) == len(step.calls)
            # Buffers of a bucket are filled anew by each call: only each bucket's last call shows.
            assert [call.dims for call in calls] == [call.dims for call in step.calls]
            for name, buffer in calls[-1].arrays.items():
                assert np.array_equal(buffer, step.calls[-1].padded[name]), name


def test_rows_and_blocks_of_a_small_prompt(bare: Path, run: Run) -> None:
    """Worked out by hand: the second step is token 4, the third closes the second block."""
    code, out, err = run("plan", bare, "--tokens", "4,1,3", "--json")
    assert (code, err) == (0, "")
    first, second, third = (step["calls"][0] for step in json.loads(out)["steps"])
    assert first["blocks"] == {"csa": 1, "hca": 0}
    assert first["bucket"]["name"] == "s1_p4_n8_csa"
    assert first["caches"]["raw"] == {
        "written": [0, 1, 2, 3],
        "spare": [],
        "read": [0, 1, 2, 3],
    }
    assert first["caches"]["csa"]["written"] == [0]
    assert first["caches"]["csa_state"]["read"] == [24, 25]  # sentinels: no block came before
    assert second["blocks"] == {"csa": 0, "hca": 0}
    assert second["caches"]["csa"]["written"] == []
    assert second["caches"]["csa_state"] == {"written": [4], "spare": [], "read": []}
    assert second["inputs"]["plan.csa.n_visible"] == {"logical": [[1]], "padded": [1]}
    assert third["tokens_per_stream"] == 3
    assert third["blocks"] == {"csa": 1, "hca": 0}
    assert third["caches"]["raw"]["written"] == [5, 6, 7]
    assert third["caches"]["raw"]["spare"] == [39]  # one padded lane, its own spare row
    assert third["caches"]["csa_state"]["read"] == [0, 1, 2, 3, 4, 24, 25]
    assert third["inputs"]["positions"]["padded"] == [[5, 6, 7, 7]]


def test_a_padded_block_is_no_part_of_the_logical_windows(bare: Path, run: Run) -> None:
    """Five tokens in six lanes: one block closes, two could."""
    _, out, _ = run("plan", bare, "--tokens", "5", "--json")
    call = json.loads(out)["steps"][0]["calls"][0]
    reads = call["inputs"]["plan.csa.state_read_idxs"]
    assert call["dims"]["BC"] == len(reads["padded"]) == 2
    assert reads["logical"] == [reads["padded"][0]]


def test_the_text_shows_bucket_inputs_and_caches(bare: Path, run: Run) -> None:
    code, out, err = run("plan", bare, "--tokens", "11,1", "--sequences", "2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "step 1: 11 tokens for each sequence, 2 graph calls"
    assert "step 2: 1 tokens for each sequence, 1 graph call" in lines
    assert lines[1].startswith(
        " call 1: bucket s2_p6_n8_csa, S=2 P=6 N=8; 12 tokens in 12 rows"
    )
    second = lines[lines.index(next(li for li in lines if li.startswith(" call 2"))) :]
    facts = {line.split()[0]: line.split("  ") for line in second if line.startswith("  ")}
    cells = {name: [c.strip() for c in row if c.strip()] for name, row in facts.items()}
    assert cells["plan.raw.write_idxs"] == [
        "plan.raw.write_idxs",
        "[T=2]",
        "11 24",
        "-",
    ]
    for name in ("tokens", "positions", "out_rows", "raw", "csa", "hca_state"):
        assert name in cells
    names = {row.name for row in read_manifest(bare).contract.host_rows}
    assert names <= cells.keys()


def test_a_plan_needs_neither_onnx_nor_onnxruntime(bare: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('onnx', 'onnxruntime', 'onnxscript', 'onnx_ir', 'torch'):\n"
        "    sys.modules[name] = None\n"
        "from cachegraph.tools.cli import main\n"
        "code = main(['plan', sys.argv[1], '--tokens', '5'])\n"
        "sys.exit(code or main(['inspect', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, bare], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "bucket s1_p6_n8_csa" in done.stdout


def test_vectors_that_match_exit_0(run: Run) -> None:
    code, out, err = run("plan", "--vectors", VECTORS)
    assert (code, err) == (0, "")
    assert "0 differ" in out.splitlines()[-1]


def test_a_vector_that_differs_exits_1(run: Run, tmp_path: Path) -> None:
    data = json.loads(VECTORS.read_text())
    record = next(r for r in data["scenarios"] if r["id"] == "p0004")
    record["out"]["raw"]["raw"]["write_dst_idxs"][2] = 9
    data["scenarios"] = [record]
    (tmp_path / "one.json").write_text(json.dumps(data))
    code, out, err = run("plan", "--vectors", tmp_path / "one.json")
    assert code == 1
    assert out.startswith("p0004 prefill_single raw.raw.write_dst_idxs: got ")
    assert "wanted [0, 1, 9, 3, 4]" in out.splitlines()[0]
    assert err == f"error: 1 scenarios of {tmp_path / 'one.json'} differ\n"
    code, out, err = run("plan", "--vectors", tmp_path / "one.json", "--json")
    assert code == 1
    assert len(json.loads(out)["differences"]) == 1


def bad_inputs() -> list[tuple[list[str], str]]:
    bundle = "BARE"
    return [
        ([], "nothing to plan; give BUNDLE and --tokens"),
        ([bundle], "nothing to plan"),
        (["--tokens", "3"], "nothing to plan"),
        ([bundle, "--tokens", ""], "--tokens ''; wanted whole numbers, such as 7,1,64"),
        ([bundle, "--tokens", "3,x"], "--tokens '3,x'; wanted whole numbers"),
        ([bundle, "--tokens", "3,0"], "--tokens '3,0'; every number must be 1 or more"),
        ([bundle, "--tokens", "51"], "sequence 0 is full: 0 of 50 positions are taken"),
        ([bundle, "--tokens", "50,1"], "sequence 0 is full: 50 of 50"),
        ([bundle, "--tokens", "1", "--sequences", "4"], "this bundle holds 1 to 3"),
        ([bundle, "--tokens", "1", "--sequences", "0"], "--sequences"),
        (["NOWHERE", "--tokens", "1"], "is no bundle: it has no manifest.json"),
        (["--vectors", "NOWHERE"], "not a file of planner vectors"),
        ([bundle, "--vectors", str(VECTORS)], "--vectors stands alone"),
    ]


@pytest.mark.parametrize(("args", "message"), bad_inputs())
def test_bad_input_is_one_line_and_2(
    bare: Path, tmp_path: Path, run: Run, args: list[str], message: str
) -> None:
    places = {"BARE": str(bare), "NOWHERE": str(tmp_path / "nowhere")}
    code, out, err = run("plan", *(places.get(arg, arg) for arg in args))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "-"),
        ([7], "7"),
        ([0, 1], "0 1"),
        ([0, 1, 2], "0..2"),
        ([3, 3, 3, 4, 5, 6, 9], "3 x3 4..6 9"),
        ([5, 4, 3], "5 4 3"),
        (list(range(0, 40, 2)), "0 2 4 6 8 10 12 14 ... (20 in all)"),
    ],
)
def test_lists_are_runs(values: list[int], text: Any) -> None:
    assert short(np.array(values, np.int64)) == text


def test_hybrid_memory_is_planned_and_shown(
    bundles: Bundles, run: Run, tmp_path: Path
) -> None:
    """Pools of 4 and two snapshots: what each step makes anew, rows of three positions."""
    capacity = Capacity(context=50, sequences=3, max_step=16, rewind=2)
    made = bundles.bundle(bundles.qwen_checkpoint("plain"), capacity=capacity)
    shutil.copyfile(made / "manifest.json", tmp_path / "manifest.json")
    code, out, _ = run("plan", str(tmp_path), "--tokens", "9,3", "--sequences", "2")
    assert code == 0
    assert "pools made anew: 4 of 4" in out
    assert "pools made anew: 2 of 6" in out
    assert "plan.pool.tail_idxs" in out
    manifest = read_manifest(made)
    planned = list(plan_steps(manifest, (9, 3), 2))
    with open_engine(made) as engine, watched(engine) as calls:
        for size, step in zip((9, 3), planned, strict=True):
            calls.clear()
            starts = {seq: engine.length(seq) for seq in range(2)}
            tokens = np.arange(2 * size) % manifest.vocab_size
            engine.decode(Batch.of(tokens, None, [0] * size + [1] * size, starts=starts))
            for name, buffer in calls[-1].arrays.items():
                assert np.array_equal(buffer, step.calls[-1].padded[name]), name
