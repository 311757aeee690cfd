"""The import direction: which house may import what. Run by `make check`.

Reads every import statement, also those inside functions and under TYPE_CHECKING, and imports by
a constant name; runs none of the code. Prints each violation and exits 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAMESPACE = "cachegraph"
DEV = "cachegraph.tools.dev"


@dataclass(frozen=True, kw_only=True, slots=True)
class House:
    """One package: the packages of ours and of others it may import (None: any)."""

    name: str
    ours: frozenset[str]
    others: frozenset[str] | None


HOUSES = (
    House(name="models", ours=frozenset({"models"}), others=frozenset({"numpy", "pydantic"})),
    House(
        name="graphgen",
        ours=frozenset({"graphgen", "models"}),
        others=frozenset(
            {"ml_dtypes", "numpy", "onnx", "onnx_ir", "onnxscript", "safetensors"}
        ),
    ),
    House(
        name="runtime",
        ours=frozenset({"models", "runtime"}),
        others=frozenset(
            {"jinja2", "numpy", "onnxruntime", "pydantic", "safetensors", "tokenizers"}
        ),
    ),
    House(
        name="tools",
        ours=frozenset({"graphgen", "models", "runtime", "tools"}),
        others=None,
    ),
)


def violations(root: Path) -> list[str]:
    """One line for each import that its house may not make, in the folders of `root`."""
    found: list[str] = []
    for house in HOUSES:
        for path in sorted((root / house.name).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            found += file_violations(house, name, path.read_text("utf-8"))
    return found


def file_violations(house: House, name: str, text: str) -> Iterator[str]:
    """The violations of one source text of a house; `name` is its path from the root."""
    for line, module in _imports(ast.parse(text, name)):
        if why := _refusal(house, module, is_dev=name.startswith("tools/dev/")):
            yield f"{name}:{line}: imports {module}: {why}"


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of each module named by an import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module == NAMESPACE:  # from cachegraph import graphgen
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module
        elif isinstance(node, ast.Call) and _is_import_call(node.func):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else None
    name = function.id if isinstance(function, ast.Name) else name
    return name in ("import_module", "__import__")


def _refusal(house: House, module: str, *, is_dev: bool) -> str | None:
    """Why a house may not import a module; None where it may."""
    if module.startswith("."):
        return "imports are absolute: write cachegraph.x.y"
    top, _, below = module.partition(".")
    if top == NAMESPACE:
        if below.partition(".")[0] not in house.ours:
            return f"{house.name} may import only {_listed(house.ours)} of cachegraph"
        if not is_dev and (module == DEV or module.startswith(f"{DEV}.")):
            return "no wheel contains tools/dev"
        return None
    if top in {each.name for each in HOUSES}:
        return f"a folder's bare name: write {NAMESPACE}.{module}"
    if house.others is None or top in sys.stdlib_module_names or top in house.others:
        return None
    return f"{house.name} may import only {_listed(house.others)} and the standard library"


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def main() -> int:
    """Print every violation; 1 if there are any."""
    found = violations(Path(__file__).resolve().parents[2])
    for violation in found:
        print(violation)
    print(f"import direction: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
