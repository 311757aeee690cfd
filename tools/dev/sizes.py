"""The size budget: how long functions and files may be. Run by `make check`.

Counts lines as they stand, docstrings and blanks included; decorators are not counted. Prints the
largest of each kind, then every excess, and exits 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FUNCTION_LIMIT = 60
SOURCE_LIMIT = 500
TEST_LIMIT = 800
FOLDERS = ("models", "graphgen", "runtime", "tools", "tests")

# "path" or "path::Class.function" -> lines allowed. The list may only shrink.
EXCEPTIONS: dict[str, int] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Lines of one file or function, and how many it may have."""

    name: str
    kind: str
    lines: int
    limit: int


def measure(root: Path) -> list[Size]:
    """Every file and function under the project folders of `root`."""
    sizes: list[Size] = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            sizes += file_sizes(path.relative_to(root).as_posix(), path.read_text("utf-8"))
    return sizes


def file_sizes(name: str, text: str) -> Iterator[Size]:
    """The size of one source text and of each function in it; `name` is its path from the root."""
    kind, limit = (
        ("test", TEST_LIMIT) if name.startswith("tests/") else ("source", SOURCE_LIMIT)
    )
    yield Size(name=name, kind=kind, lines=len(text.splitlines()), limit=limit)
    for function, lines in _functions(ast.parse(text, name), ""):
        yield Size(
            name=f"{name}::{function}", kind="function", lines=lines, limit=FUNCTION_LIMIT
        )


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    """Qualified name and length of each function below a node, nested ones too."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{child.name}."
            if not isinstance(child, ast.ClassDef):
                assert child.end_lineno is not None  # ast.parse always sets it
                yield f"{prefix}{child.name}", child.end_lineno - child.lineno + 1
        yield from _functions(child, inner)


def excesses(sizes: Iterable[Size], exceptions: Mapping[str, int]) -> list[str]:
    """One line for each size over its budget, and for each exception that is no longer needed."""
    by_name = {size.name: size for size in sizes}
    faults = [
        f"{size.name}: {size.lines} lines; a {size.kind} may have {allowed}: split it"
        for size in by_name.values()
        if size.lines > (allowed := exceptions.get(size.name, size.limit))
    ]
    for name, allowed in exceptions.items():
        size = by_name.get(name)
        if size is None or size.lines <= size.limit or size.lines < allowed:
            now = "gone" if size is None else f"{size.lines} lines"
            faults.append(
                f"{name}: is {now}, the exception allows {allowed}: lower or drop it"
            )
    return faults


def table(sizes: Iterable[Size], count: int = 5) -> str:
    """The largest few of each kind, with the number and the total of all."""
    rows: list[str] = []
    listed = list(sizes)
    for kind in dict.fromkeys(size.kind for size in listed):
        group = sorted(
            (size for size in listed if size.kind == kind), key=lambda size: -size.lines
        )
        total = sum(size.lines for size in group)
        rows.append(f"{kind}: {len(group)}, {total} lines, limit {group[0].limit} each")
        rows += [f"  {size.lines:5d}  {size.name}" for size in group[:count]]
    return "\n".join(rows)


def main() -> int:
    """Print the table and the excesses; 1 if there are any."""
    sizes = measure(Path(__file__).resolve().parents[2])
    print(table(sizes))
    faults = excesses(sizes, EXCEPTIONS)
    for fault in faults:
        print(f"over budget: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
