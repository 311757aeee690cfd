"""Options of a bundle one at a time against transformers, at one tiny size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import Bundles, open_engine
from support.cases import Case, make_case

from cachegraph.models.capacity import Capacity
from cachegraph.models.export_options import (
    Dialect,
    Experts,
    RowRead,
    RowWrite,
    Select,
    WeightType,
)
from cachegraph.runtime.batch import Batch

pytestmark = pytest.mark.r3

TO_ORACLE = 1e-4
ONE_CHOICE: tuple[Mapping[str, Any], ...] = (
    {"gather": RowRead.ELEMENTS},
    {"gather": RowRead.ND},
    {"scatter": RowWrite.ELEMENTS},
    {"select": Select.MASK},
    {"experts": Experts.ALL},
)


@pytest.fixture(scope="module")
def case(bundles: Bundles) -> Case:
    return bundles.once(("case", "mixed"), lambda: make_case(bundles.checkpoint()))


def farthest(bundle: Path, case: Case) -> float:
    """The longest text in uneven steps, beside the second one: distance to transformers."""
    long, short = case.texts[:2]
    worst = 0.0
    with open_engine(bundle) as engine:
        for start, end in ((0, 50), (50, 51), (51, 60), (60, len(long))):
            parts = {3: (long, start, end), 0: (short, start, min(end, len(short)))}
            tokens = np.concatenate([t.tokens[a:b] for t, a, b in parts.values()])
            positions = np.concatenate([np.arange(a, b) for _, a, b in parts.values()])
            owners = [seq for seq, (_, a, b) in parts.items() for _ in range(a, b)]
            logits = engine.decode(Batch.of(tokens, positions, owners, logits=True))
            wanted = np.concatenate([t.logits[a:b] for t, a, b in parts.values()])
            worst = max(worst, float(np.abs(logits - wanted).max()))
    return worst


def capacity(case: Case) -> Capacity:
    return Capacity(context=case.context, sequences=4, max_step=24)


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("choice", ONE_CHOICE, ids=lambda c: " ".join(map(str, *c.items())))
def test_each_lowering(
    bundles: Bundles, case: Case, dialect: Dialect, choice: Mapping[str, Any]
) -> None:
    bundle = bundles.bundle(case.folder, dialect=dialect, capacity=capacity(case), **choice)
    assert farthest(bundle, case) <= TO_ORACLE


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("weights", [WeightType.F16, WeightType.BF16])
def test_half_weights_are_the_rounded_weights(
    bundles: Bundles, dialect: Dialect, weights: WeightType
) -> None:
    """transformers runs the rounded checkpoint in float32; nothing else may round."""
    folder = bundles.checkpoint(rounded=weights)
    rounded = bundles.once(("case", weights), lambda: make_case(folder))
    bundle = bundles.bundle(
        folder, dialect=dialect, weights=weights, capacity=capacity(rounded)
    )
    assert farthest(bundle, rounded) <= TO_ORACLE


def test_half_weights_halve_the_file(bundles: Bundles, case: Case) -> None:
    """Norms, router, hyper-connections, compressors and indexer stay in float."""
    sizes = {
        form: (bundles.bundle(case.folder, weights=form) / "weights.safetensors")
        .stat()
        .st_size
        for form in (WeightType.F32, WeightType.F16, WeightType.BF16)
    }
    for form in (WeightType.F16, WeightType.BF16):
        assert 0.5 < sizes[form] / sizes[WeightType.F32] < 0.75


def test_only_wanted_rows_come_back_in_order(bundles: Bundles, case: Case) -> None:
    """Rows asked for here and there among two sequences."""
    long, short = case.texts[:2]
    wanted = np.random.default_rng(4).random(90) < 0.3
    tokens = np.stack([long.tokens[:45], short.tokens[:45]], axis=1).ravel()
    positions = np.repeat(np.arange(45), 2)
    bundle = bundles.bundle(case.folder, capacity=capacity(case))
    with open_engine(bundle) as engine:
        logits = engine.decode(Batch.of(tokens, positions, [1, 2] * 45, logits=wanted))
    rows = np.stack([long.logits[:45], short.logits[:45]], axis=1).reshape(90, -1)
    assert len(logits) == wanted.sum()
    np.testing.assert_allclose(logits, rows[wanted], rtol=0, atol=TO_ORACLE)
