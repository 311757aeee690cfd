"""The wheel, built once, and fresh environments that hold it and what it declares, offline."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
HOUSES = ("models", "graphgen", "runtime", "tools")


def pip(*args: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"pip {args}:\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder of an older build can leak into it."""
    source = tmp_path_factory.mktemp("source")
    for name in HOUSES:
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    (built,) = out.glob("cachegraph-*.whl")
    return built


@pytest.fixture(scope="session")
def onnxruntime_extra() -> str:
    """The extra whose onnxruntime is installed here."""
    try:
        distribution("onnxruntime-gpu")
    except PackageNotFoundError:
        return "cpu"
    return "cuda"


@pytest.fixture(scope="session")
def fresh_python(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """fresh_python(extra) -> the python of an environment with the wheel and its extra alone.

    What the wheel declares is linked from the environment of the tests, nothing else is; then pip
    installs the wheel without an index, so a requirement that is undeclared is missing.
    """

    @cache
    def make(extra: str = "") -> Path:
        home = tmp_path_factory.mktemp("fresh")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        (packages,) = home.glob("lib/python3*/site-packages")
        wanted = Requirement(f"cachegraph[{extra}]" if extra else "cachegraph")
        for found in closure(wheel_requirements(wheel), wanted.extras):
            link(found, packages)
        python = home / "bin" / "python"
        target = f"{wheel}[{extra}]" if extra else wheel
        pip("--python", python, "install", "--no-index", target)
        return python

    return make


def wheel_requirements(wheel: Path) -> list[str]:
    """The Requires-Dist lines of the built wheel."""
    (found,) = Distribution.discover(name="cachegraph", path=[str(wheel)])
    return found.requires or []


def closure(requirements: list[str], extras: set[str]) -> list[Distribution]:
    """The installed distributions that the requirements need, with those they need in turn."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()

    def visit(lines: list[str], extra: str) -> None:
        for each in applying(lines, extra):
            name = canonicalize_name(each.name)
            try:
                found.setdefault(name, distribution(name))
            except PackageNotFoundError:
                pytest.fail(f"{name} is declared and not installed here: run make test")
            for inner in ("", *each.extras):
                if (name, inner) not in seen:
                    seen.add((name, inner))
                    visit(found[name].requires or [], inner)

    for extra in ("", *extras):
        visit(requirements, extra)
    return list(found.values())


def applying(lines: list[str], extra: str) -> Iterator[Requirement]:
    """The requirements that hold on this machine for one extra."""
    for line in lines:
        each = Requirement(line)
        if each.marker is None or each.marker.evaluate({"extra": extra}):
            yield each


def link(found: Distribution, packages: Path) -> None:
    """Link each top-level entry of an installed distribution into a site-packages folder."""
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    for top in tops:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(found.locate_file(top))))
