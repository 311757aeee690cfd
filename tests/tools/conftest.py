"""Bundles shared by the command tests of a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.bundles import Bundles

from cachegraph.tools import cli

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """Checkpoints and bundles, each made once."""
    return Bundles(tmp_path_factory.mktemp("bundles"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `cachegraph` with arguments: exit code, stdout, stderr."""

    def command(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(arg) for arg in args])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return command
