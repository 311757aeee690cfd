"""A bundle of stages: each keeps the profile's rules, and together they are the whole model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from support import graphs
from support.bundles import Bundles

from cachegraph.graphgen.freeze import freeze
from cachegraph.models.buckets import Bucket
from cachegraph.models.export_options import Dialect, WeightType
from cachegraph.models.manifest import read_manifest

pytestmark = pytest.mark.r1

CHOICES: tuple[dict[str, Any], ...] = (
    {"split": (2, 3)},
    {"split": (1, 1, 1, 1, 1), "dialect": Dialect.ORT},
    {"split": (1, 3, 1), "weights": WeightType.F16},
)


@pytest.fixture(params=CHOICES, ids=str)
def folder(request: pytest.FixtureRequest, bundles: Bundles) -> Path:
    return bundles.bundle(bundles.checkpoint(), **request.param)


def test_every_stage_is_its_contract_static_when_frozen_and_alias_safe(folder: Path) -> None:
    manifest = read_manifest(folder)
    context = manifest.ladder.contexts[0]
    kinds = tuple(spec.kind for spec in manifest.planners.compressors)
    bucket = Bucket(streams=2, step=4, context=context, closes=kinds)
    for stage in manifest.stages:
        contract = manifest.stage_contract(stage)
        onnx.checker.check_model(folder / stage.template, full_check=True)
        model = graphs.load(folder / stage.template)
        for values, rows in (
            (model.graph.input, contract.inputs),
            (model.graph.output, contract.outputs),
        ):
            assert list(graphs.shapes(values).items()) == [(r.name, r.shape) for r in rows]
        caches = {spec.name: spec.out_name for spec in contract.caches}
        frozen = freeze(model, manifest.dims(bucket))
        inner = graphs.shapes(frozen.graph.value_info).values()
        assert all(isinstance(size, int) for shape in inner for size in shape)
        assert graphs.alias_hazards(model, caches) == []
        assert graphs.alias_hazards(frozen, caches) == []


def test_stages_hold_the_weights_of_the_whole_once(folder: Path, bundles: Bundles) -> None:
    manifest = read_manifest(folder)
    options = manifest.exporter.options
    whole = read_manifest(
        bundles.bundle(
            bundles.checkpoint(),
            dialect=Dialect(options["dialect"]),
            weights=WeightType(options["weights"]),
        )
    )
    assert manifest.weights is not None
    assert whole.weights is not None
    names: Counter[str] = Counter()
    for stage in manifest.stages:
        names.update(
            tensor.name
            for tensor in graphs.load(folder / stage.template).graph.initializer
            if tensor.data_location == onnx.TensorProto.EXTERNAL
        )
    assert set(names.values()) == {1}
    assert manifest.weights.num_bytes == whole.weights.num_bytes
