"""Bundles shared by the graph tests of a session."""

from __future__ import annotations

import pytest
from support.bundles import Bundles


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """Checkpoints and bundles, each made once."""
    return Bundles(tmp_path_factory.mktemp("bundles"))
