"""Split bundles on the command line: how they are made, shown and run, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.bundles import Bundles
from support.engines import text

from cachegraph.models.manifest import read_manifest

pytestmark = pytest.mark.r2
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def split(bundles: Bundles, tmp_path: Path, run: Run) -> Path:
    """Two stages of the mixed model, exported by the command."""
    flags = ("--context", "64", "--split", "2,3", "--devices", "cuda:0,cuda:1")
    code, _, err = run("export", bundles.checkpoint(), tmp_path / "split", *flags)
    assert code == 0, err
    return tmp_path / "split"


def test_export_writes_stages_that_inspect_shows_and_logits_runs(
    bundles: Bundles, split: Path, tmp_path: Path, run: Run
) -> None:
    stages = read_manifest(split).stages
    assert [(s.first, s.end, s.device) for s in stages] == [(0, 2, "cuda:0"), (2, 5, "cuda:1")]
    code, shown, _ = run("inspect", split)
    assert code == 0
    assert "template of layers 0 to 1, cuda:0" in shown
    assert "template of layers 2 to 4, cuda:1" in shown
    assert run("inspect", split, "--verify")[0] == 0
    _, shown, _ = run("inspect", split, "--json")
    assert len(json.loads(shown)["manifest"]["stages"]) == 2
    np.save(tmp_path / "ids.npy", np.array(text(0, 0, 11, 131), np.int32))
    rows = []
    for bundle in (split, bundles.bundle(bundles.checkpoint())):
        out = tmp_path / "rows.npy"
        places = ("--tokens", tmp_path / "ids.npy", "--out", out, "--device", "cpu")
        assert run("logits", bundle, *places, "--threads", "1")[0] == 0
        rows.append(np.load(out))
    assert np.abs(rows[0] - rows[1]).max() <= 1e-5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--split", "2,2"), "makes 4 layers; the model has 5"),
        (("--split", "2,x"), "wanted layers of each stage, such as 22,21"),
        (("--split", "5,0"), "every stage needs 1 layer or more"),
        (("--devices", "cpu,cpu"), "--devices needs --split"),
        (("--split", "2,3", "--devices", "cpu"), "name one a stage"),
        (("--split", "2,3", "--devices", "cpu,gpu"), "no device 'gpu'"),
        (("--split", "2,3", "--static", "1x1x64"), "static graphs of stages are not made"),
    ],
)
def test_a_split_that_cannot_be_is_one_line_and_writes_nothing(
    bundles: Bundles, tmp_path: Path, run: Run, flags: tuple[str, ...], message: str
) -> None:
    code, shown, err = run("export", bundles.checkpoint(), tmp_path / "out", *flags)
    assert (code, shown, (tmp_path / "out").exists()) == (2, "", False)
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_what_stages_do_not_have_is_refused_in_one_line(split: Path, run: Run) -> None:
    code, _, err = run("freeze", split, "1x1x64")
    assert code == 2
    assert "is split into stages, of which static graphs are not made" in err
    code, _, err = run("generate", split, "--prompt", "a", "--device", "cuda:9")
    assert code == 2
    assert "device cuda:9" in err
    assert len(err.strip().splitlines()) == 1
