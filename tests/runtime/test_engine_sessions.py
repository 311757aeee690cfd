"""Whole engines opened in different ways: optimisation levels and devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engines import feed

from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2


@pytest.mark.parametrize("level", ["disable", "basic", "extended", "layout"])
def test_every_optimisation_level_gives_the_same_numbers(engine: Engine, level: Any) -> None:
    wanted = [feed(engine, counts) for counts in ({0: 17, 1: 4}, {0: 1, 1: 1})]
    with Engine.load(
        engine.folder, device="cpu", threads=1, spinning=False, optimization=level
    ) as other:
        for counts, theirs in zip(({0: 17, 1: 4}, {0: 1, 1: 1}), wanted, strict=True):
            for seq, rows in feed(other, counts).items():
                assert np.abs(rows - theirs[seq]).max() <= 1e-5


def test_auto_says_which_provider_runs(engine: Engine) -> None:
    with Engine.load(engine.folder, threads=1, spinning=False) as auto:
        assert auto.device in ("cpu", "cuda")
        assert (
            auto.provider
            == {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[auto.device]
        )
