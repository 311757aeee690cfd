"""The size budget holds, and a function or file over it is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachegraph.tools.dev.sizes import EXCEPTIONS, excesses, file_sizes, measure

pytestmark = pytest.mark.r0


def function(lines: int, indent: str = "") -> str:
    return f"{indent}def f():\n" + f"{indent}    x = 1\n" * (lines - 1)


def test_everything_is_within_budget(root: Path) -> None:
    assert excesses(measure(root), EXCEPTIONS) == []


@pytest.mark.parametrize(("lines", "faults"), [(60, 0), (61, 1)])
def test_a_function_may_have_sixty_lines(lines: int, faults: int) -> None:
    assert len(excesses(file_sizes("models/x.py", function(lines)), {})) == faults


def test_methods_and_nested_functions_are_measured() -> None:
    text = "class A:\n" + function(61, "    ") + "        def g(): ...\n"
    names = {size.name: size.lines for size in file_sizes("models/x.py", text)}
    assert names["models/x.py::A.f"] == 62
    assert names["models/x.py::A.f.g"] == 1


@pytest.mark.parametrize(
    ("name", "lines", "faults"),
    [
        ("runtime/x.py", 500, 0),
        ("runtime/x.py", 501, 1),
        ("tests/x.py", 800, 0),
        ("tests/x.py", 801, 1),
    ],
)
def test_files_stop_at_their_limit(name: str, lines: int, faults: int) -> None:
    assert len(excesses(file_sizes(name, "x = 1\n" * lines), {})) == faults


def test_an_exception_may_only_shrink() -> None:
    sizes = list(file_sizes("models/x.py", "x = 1\n" * 510))
    assert excesses(sizes, {"models/x.py": 510}) == []
    assert len(excesses(sizes, {"models/x.py": 509})) == 1  # it grew
    assert len(excesses(sizes, {"models/x.py": 520})) == 1  # it shrank: lower the number
    assert len(excesses(sizes, {"models/x.py": 510, "models/gone.py": 600})) == 1
