"""Bundles and engines shared by the runtime tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.bundles import Bundles
from support.engines import Engines

from cachegraph.runtime.engine import Engine


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """Checkpoints and bundles, each made once."""
    return Bundles(tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="session")
def engines(bundles: Bundles) -> Iterator[Engines]:
    """Engines, each opened once; what a test left in their caches stays there as junk."""
    with Engines(bundles) as opened:
        yield opened


@pytest.fixture
def engine(engines: Engines) -> Engine:
    """The mixed model, four sequences, all of them forgotten."""
    return engines.get()
