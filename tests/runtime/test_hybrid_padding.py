"""Hybrid memory: what padded lanes, spare rows and earlier steps leave behind changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from support.bundles import Bundles, open_engine
from support.engines import Call, poison_inputs, poison_results, watched
from support.hybrid_fuzz import live_rows

from cachegraph.models.capacity import Capacity
from cachegraph.models.export_options import Dialect, Select
from cachegraph.runtime import Batch, Engine

pytestmark = pytest.mark.r2

TEXTS = np.random.default_rng(9).integers(6, 90, size=(4, 80))
STEPS = ({0: 30, 3: 2}, {1: 11}, {0: 1, 1: 1, 3: 1}, {0: 2, 1: 5, 2: 24, 3: 9}, {2: 1}, {3: 3})
CHOICES = {
    "gather": {},
    "mask": {"select": Select.MASK},
    "ort": {"dialect": Dialect.ORT},
}


@pytest.fixture(scope="module", params=CHOICES)
def engine(request: pytest.FixtureRequest, bundles: Bundles) -> Iterator[Engine]:
    checkpoint = bundles.qwen_checkpoint("plain", index_heads=16)
    capacity = Capacity(context=64, sequences=4, max_step=24, rewind=2)
    bundle = bundles.bundle(checkpoint, capacity=capacity, **CHOICES[request.param])
    with open_engine(bundle) as opened:
        yield opened


def run(engine: Engine) -> list[NDArray[np.float32]]:
    """Logits of STEPS from nothing, and the rows that every sequence holds after them."""
    engine.clear()
    found = []
    for counts in STEPS:
        parts = [
            (seq, place)
            for seq, count in counts.items()
            for place in range(engine.length(seq), engine.length(seq) + count)
        ]
        tokens = [TEXTS[seq, place] for seq, place in parts]
        places, owners = [place for _, place in parts], [seq for seq, _ in parts]
        found.append(engine.decode(Batch.of(tokens, places, owners, logits=True)))
    for seq in range(engine.num_sequences):
        found += live_rows(engine, seq).values()
    return found


def spoil(engine: Engine, value: float) -> None:
    """Write a value into every spare row."""
    for spec in engine.manifest.contract.caches:
        engine._store.caches[spec.name].array[spec.layout.spare_start :] = value


def equal(ours: list[NDArray[np.float32]], theirs: list[NDArray[np.float32]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_what_the_last_step_left_in_buffers_is_never_read(engine: Engine) -> None:
    wanted = run(engine)
    poison_results(engine)
    with watched(engine, after=lambda call: poison_inputs(engine)):
        assert equal(run(engine), wanted)


@pytest.mark.parametrize("value", [1e6, np.nan])
def test_spare_rows_are_never_read(engine: Engine, value: float) -> None:
    wanted = run(engine)
    spoil(engine, value)
    with watched(engine, after=lambda call: spoil(engine, value)):
        assert equal(run(engine), wanted)


@pytest.mark.parametrize(("token", "place"), [(1, 0), (77, 5000)])
def test_what_padded_lanes_hold_changes_no_live_number(
    engine: Engine, token: int, place: int
) -> None:
    """Tokens, positions and n-gram rows of lanes that no real token fills.

    To float noise: MoE kernels take the tokens of an expert together, padded ones too.
    """
    wanted = run(engine)
    poisoned = 0

    def poison(call: Call) -> None:
        nonlocal poisoned
        arrays, counts = call.arrays, call.arrays["plan.recurrent.n_tokens"]
        streams, step = arrays["tokens"].shape
        is_padding = np.arange(step) >= counts[:, None]  # [S, P]
        arrays["tokens"][is_padding] = token
        arrays["positions"][is_padding] = place
        arrays["plan.ngram.ids"].reshape(streams, step, -1)[is_padding] = token
        poisoned += int(is_padding.sum())

    with watched(engine, before=poison):
        found = run(engine)
    assert poisoned
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)
