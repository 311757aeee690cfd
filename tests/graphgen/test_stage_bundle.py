"""A bundle of stages: each keeps the profile's rules, and together they are the whole model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from support import graphs
from support.bundles import Bundles

from cachegraph.graphgen.freeze import freeze
from cachegraph.models.buckets import Bucket
from cachegraph.models.contract import CARRIED, STREAMS
from cachegraph.models.errors import ContractError
from cachegraph.models.export_options import Dialect, WeightType
from cachegraph.models.manifest import MANIFEST_NAME, parse_manifest, read_manifest

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


Stages = list[dict[str, Any]]


def put(field: str, value: object, number: int = 1) -> Callable[[Stages], None]:
    return lambda stages: stages[number].update({field: value})


def row(stage: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in stage["tensors"] if row["name"] == name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put("first", 2), "layers 0 to 0, 2 to 3, 4 to 4, wanted 0 to 4 in order"),
        (put("first", 0), "layers 0 to 0, 0 to 3"),
        (put("first", -1, 0), "layers -1 to 0"),
        (put("end", 9, 2), "layers 0 to 0, 1 to 3, 4 to 8, wanted"),
        (lambda stages: stages.pop(), "layers 0 to 0, 1 to 3, wanted"),
        (lambda stages: stages.reverse(), "layers 4 to 4, 1 to 3, 0 to 0, wanted"),
        (put("device", "gpu"), r"'stages\.1\.device': .*no device 'gpu'"),
        (
            lambda stages: row(stages[1], "cache.2.raw").update(dtype="int8"),
            "stage 1 does not",
        ),
        (lambda stages: row(stages[2], CARRIED).update(name="other"), "stage 2 does not"),
        (lambda stages: row(stages[0], STREAMS).update(shape=["T", 7]), "stage 1 does not"),
    ],
)
def test_a_manifest_whose_stages_are_not_the_model_is_refused(
    bundles: Bundles, damage: Callable[[Stages], None], message: str
) -> None:
    folder = bundles.bundle(bundles.checkpoint(), split=(1, 3, 1))
    raw = json.loads((folder / MANIFEST_NAME).read_text())
    parse_manifest(raw, "here")
    damage(raw["stages"])
    with pytest.raises(ContractError, match=message):
        parse_manifest(raw, "here")
