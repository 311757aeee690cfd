"""The installed wheel turns a bundle into text where nothing of the builder is installed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachegraph.tools.cli import main

pytestmark = pytest.mark.r2


@pytest.fixture(scope="module")
def moved_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The shipped model, exported in one folder, moved to another and made read-only."""
    made = tmp_path_factory.mktemp("export") / "made"
    assert main(["export", "tiny:deepseek_v4", str(made), "--context", "256"]) == 0
    moved = made.rename(tmp_path_factory.mktemp("deployed") / "bundle")
    for path in (*moved.rglob("*"), moved):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield moved
    for path in (moved, *moved.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_the_wheel_and_one_onnxruntime_generate(
    fresh_python: Callable[[str], Path], onnxruntime_extra: str, moved_bundle: Path
) -> None:
    python = fresh_python(onnxruntime_extra)
    files_before = sorted(moved_bundle.rglob("*"))
    options = ["--prompt", "import ", "--max-tokens", "8", "--device", "cpu", "--json"]
    done = subprocess.run(
        [python.with_name("cachegraph"), "generate", moved_bundle, *options],
        cwd=python.parent,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert sorted(moved_bundle.rglob("*")) == files_before


def test_without_onnxruntime_one_line_says_what_to_install(
    fresh_python: Callable[[str], Path], moved_bundle: Path
) -> None:
    command = fresh_python("").with_name("cachegraph")
    done = subprocess.run(
        [command, "generate", moved_bundle, "--prompt", "import "],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "cachegraph[cpu]" in done.stderr
