"""What only a process of its own shows: quiet stderr, what need not be installed, idle threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bundles import Bundles

pytestmark = pytest.mark.r2

# What a deployed bundle does without, refused as on a machine that lacks it.
BLOCK = """
import sys

class Blocked:
    names = ("onnx", "onnxscript", "onnx_ir", "torch", "transformers", "ml_dtypes",
             "cachegraph.graphgen")

    def find_spec(self, name, path, target=None):
        if any(name == n or name.startswith(n + ".") for n in self.names):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
"""
GENERATE = (
    BLOCK
    + """
from cachegraph.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""
)
LOAD = """
import sys
from cachegraph.runtime import Engine
with Engine.load(sys.argv[1], threads=1, spinning=False) as engine:
    engine.append([1, 2, 3])
    print(engine.provider)
"""
IDLE = """
import sys, time
from cachegraph.runtime import Engine
with Engine.load(sys.argv[1], device="cpu", threads=2, spinning=False) as engine:
    engine.append([1] * 24)
    start = time.process_time()
    time.sleep(1)
    print(time.process_time() - start)
"""


def python(program: str, *args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def moved(bundles: Bundles, tmp_path: Path) -> Iterator[Path]:
    """The shipped model's bundle in a read-only folder elsewhere."""
    folder = tmp_path / "far" / "away"
    shutil.copytree(bundles.bundle("tiny:deepseek_v4"), folder)
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    folder.chmod(0o755)


@pytest.mark.parametrize("through", ["folder", "link", "relative"])
def test_a_moved_bundle_generates_without_the_builder(
    moved: Path, tmp_path: Path, through: str
) -> None:
    """B28: read-only, from another working directory, also through a linked folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "link"
    link.symlink_to(moved)
    bundle = {"folder": moved, "link": link, "relative": Path("../link")}[through]
    options = ("--prompt", "import os", "--max-tokens", "8", "--threads", "1", "--json")
    held = {path.name: path.stat().st_mtime_ns for path in (moved, *moved.iterdir())}
    done = python(GENERATE, "generate", bundle, *options, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    # Root may write into a read-only folder: nothing did.
    assert held == {path.name: path.stat().st_mtime_ns for path in (moved, *moved.iterdir())}
    assert '"finish": "length"' in done.stdout
    assert list(elsewhere.iterdir()) == []


def test_the_blocked_packages_are_blocked(tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript.nn", "torch", "cachegraph.graphgen"):
        done = python(f"{BLOCK}\nimport {name}", cwd=tmp_path)
        assert done.returncode == 1
        assert f"{name.split('.')[0]}" in done.stderr
        assert "is blocked" in done.stderr


def test_auto_prints_nothing_on_stderr(bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles.bundle(bundles.checkpoint())
    done = python(LOAD, bundle, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout in ("CPUExecutionProvider\n", "CUDAExecutionProvider\n")


def test_cuda_without_a_gpu_is_one_line(bundles: Bundles, tmp_path: Path) -> None:
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("a GPU is here")
    bundle = bundles.bundle("tiny:deepseek_v4")
    program = "import sys; from cachegraph.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    done = python(
        program, "generate", bundle, "--prompt", "x", "--device", "cuda", cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: device cuda: ONNX Runtime sees no NVIDIA GPU here")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_an_idle_engine_burns_no_cpu(bundles: Bundles, tmp_path: Path) -> None:
    """B32: threads that do not spin take no CPU time at all; spinning ones took 0.03 s here."""
    done = python(IDLE, bundles.bundle(bundles.checkpoint()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.01
