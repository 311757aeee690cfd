"""pyproject.toml names every package, and each is typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.r0
HOUSES = ("models", "graphgen", "runtime", "tools")


def code_folders(root: Path) -> dict[str, str]:
    """Package -> folder, for each folder with Python files that a wheel should contain."""
    folders = {
        path.parent.relative_to(root)
        for house in HOUSES
        for path in (root / house).rglob("*.py")
    }
    return {
        "cachegraph." + ".".join(folder.parts): folder.as_posix()
        for folder in folders
        if folder.parts[:2] != ("tools", "dev")
    }


def test_pyproject_lists_every_folder_with_code(root: Path, pyproject: dict[str, Any]) -> None:
    setuptools = pyproject["tool"]["setuptools"]
    assert setuptools["package-dir"] == code_folders(root)
    assert setuptools["packages"] == sorted(code_folders(root))


def test_every_package_has_an_init(root: Path) -> None:
    bare = [f for f in code_folders(root).values() if not (root / f / "__init__.py").exists()]
    assert bare == []


@pytest.mark.parametrize("house", HOUSES)
def test_every_house_is_typed(root: Path, house: str) -> None:
    assert (root / house / "py.typed").is_file()


def test_the_namespace_has_no_init(root: Path) -> None:
    assert not (root / "__init__.py").exists()


def test_no_onnxruntime_is_a_hard_dependency(pyproject: dict[str, Any]) -> None:
    assert not any("onnx" in line for line in pyproject["project"]["dependencies"])
