"""The wheel holds every module and data file and nothing else, and runs on what it declares."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.r1
HOUSES = ("models", "graphgen", "runtime", "tools")


def expected_files(root: Path) -> set[str]:
    """Modules, py.typed and the shipped checkpoints, by their names in the wheel."""
    files = [p for house in HOUSES for p in (root / house).rglob("*.py")]
    files += [root / house / "py.typed" for house in HOUSES]
    files += [p for p in (root / "models" / "checkpoints").rglob("*") if p.is_file()]
    names = {
        path.relative_to(root).as_posix() for path in files if "__pycache__" not in path.parts
    }
    return {f"cachegraph/{name}" for name in names if not name.startswith("tools/dev/")}


def test_the_wheel_holds_exactly_the_packages(root: Path, wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected_files(root)


def test_the_wheel_carries_the_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys

absent, *houses = sys.argv[1:]
for name in absent.split(","):
    assert importlib.util.find_spec(name) is None, f"{name} should not be here"
for house in houses:
    package = importlib.import_module(house)
    for module in pkgutil.walk_packages(package.__path__, house + "."):
        importlib.import_module(module.name)
"""
BUILDER = "onnx,onnxscript,onnx_ir,ml_dtypes,torch,transformers"


def test_the_wheel_alone_imports_the_light_half(fresh_python: Callable[[str], Path]) -> None:
    """Without any onnxruntime: models, the planners and every command."""
    python = fresh_python("")
    light = ("cachegraph.models", "cachegraph.runtime.planners", "cachegraph.tools")
    done = run(python, "-c", IMPORT_ALL, f"{BUILDER},onnxruntime", *light)
    assert done.returncode == 0, done.stderr
    command = run(python.with_name("cachegraph"), "--help")
    assert command.returncode == 0, command.stderr
    assert "Usage: cachegraph" in command.stdout


def test_the_runtime_needs_onnxruntime_and_nothing_of_the_builder(
    fresh_python: Callable[[str], Path], onnxruntime_extra: str
) -> None:
    python = fresh_python(onnxruntime_extra)
    done = run(python, "-c", IMPORT_ALL, BUILDER, "cachegraph.runtime")
    assert done.returncode == 0, done.stderr


def run(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run from the folder of the program, so that the checkout is not importable."""
    isolated = ["-I"] if program.name == "python" else []
    return subprocess.run(
        [program, *isolated, *args],
        cwd=program.parent,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
    )
