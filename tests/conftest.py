"""Rules of every run: each test names its rung, and --no-torch proves that it needs no torch."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

# Folders whose modules import torch or transformers at their top.
TORCH_FOLDERS = ("oracle", "dev")
BLOCKED = ("torch", "transformers")

# No test may reach for a hub, whatever the user's environment says.
os.environ["HF_HUB_OFFLINE"] = "1"


class BlockedFinder:
    """Refuses the packages of BLOCKED, as on a machine that lacks them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name}: blocked by --no-torch", name=name)
        return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-torch",
        action="store_true",
        help=f"block {' and '.join(BLOCKED)}; leaves out tests/{', tests/'.join(TORCH_FOLDERS)}",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-torch"):
        sys.meta_path.insert(0, BlockedFinder())


def pytest_ignore_collect(
    collection_path: os.PathLike[str], config: pytest.Config
) -> bool | None:
    if not config.getoption("--no-torch"):
        return None
    roots = {config.rootpath / "tests" / folder for folder in TORCH_FOLDERS}
    return True if collection_path in roots else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rungs = set(rung_meanings(config))
    faults = [
        f"{item.nodeid} has {', '.join(sorted(found)) or 'none'}"
        for item in items
        if len(found := {mark.name for mark in item.iter_markers()} & rungs) != 1
    ]
    if faults:
        listed = "\n  ".join(faults)
        raise pytest.UsageError(
            f"each test has exactly one rung ({', '.join(sorted(rungs))}); "
            f"mark these, for example with `pytestmark = pytest.mark.r0`:\n  {listed}"
        )


def rung_meanings(config: pytest.Config) -> dict[str, str]:
    """Rung -> its line in pyproject.toml."""
    pairs = (line.split(":", 1) for line in config.getini("markers"))
    return {name: why.strip() for name, why in pairs if name[0] == "r" and name[1:].isdigit()}


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """How many tests each rung ran and how long they took, beside the rung's meaning."""
    if config.getoption("--collect-only"):
        return
    meanings = rung_meanings(config)
    seconds: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            for rung in meanings.keys() & report.keywords.keys():
                seconds[rung] += report.duration
                tests[rung].add(report.nodeid)
    terminalreporter.section("rungs")
    for rung, meaning in sorted(meanings.items()):
        terminalreporter.line(
            f"{rung} {len(tests[rung]):5d} tests {seconds[rung]:7.1f} s  {meaning}"
        )
