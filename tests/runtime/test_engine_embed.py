"""Embeddings: the rows that the head turns into logits, for the tokens that ask."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.bundles import Bundles
from support.engines import batch_of, cold

from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2


def test_embeddings_times_the_head_are_the_logits(bundles: Bundles, engine: Engine) -> None:
    head = load_file(bundles.checkpoint() / "model.safetensors")["head.weight"]
    logits = cold(engine, 0, [23])
    engine.clear(0)
    batch = batch_of(engine, {0: 23})
    rows = engine.embed(batch)
    assert rows.shape == (23, head.shape[1])
    assert np.abs(rows @ head.astype(np.float32).T - logits).max() <= 1e-5
    assert engine.length(0) == 23


def test_only_tokens_that_ask_get_a_row(engine: Engine) -> None:
    whole = engine.embed(batch_of(engine, {0: 9}))
    engine.clear(0)
    batch = batch_of(engine, {0: 9})
    batch.wants_logits[:] = False
    batch.wants_logits[[2, 7]] = True
    assert np.abs(engine.embed(batch) - whole[[2, 7]]).max() <= 1e-5
