"""A bundle with the MTP block: its draft graph keeps the profile's rules, its weights lie once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import onnx
import pytest
from safetensors import safe_open
from support import graphs
from support.bundles import Bundles
from support.tiny import CONFIGS

from cachegraph.graphgen import export_preset
from cachegraph.graphgen.freeze import freeze
from cachegraph.models.buckets import Bucket
from cachegraph.models.cache_types import CacheType
from cachegraph.models.deepseek_v4.draft_contract import draft_contract
from cachegraph.models.deepseek_v4.serial import from_dict
from cachegraph.models.errors import ContractError
from cachegraph.models.export_options import (
    Dialect,
    Experts,
    RowRead,
    RowWrite,
    WeightType,
)
from cachegraph.models.manifest import DraftEntry, Manifest, parse_manifest, read_manifest

pytestmark = pytest.mark.r1

CHOICES = (
    *({"dialect": dialect} for dialect in Dialect),
    {"gather": RowRead.ELEMENTS, "scatter": RowWrite.ELEMENTS},
    {"gather": RowRead.ND},
    {"experts": Experts.ALL},
    {"cache": CacheType.F16},
)
FORMS = list(product(Dialect, (WeightType.F32, WeightType.INT8, WeightType.INT4)))


def open_draft(folder: Path) -> tuple[Manifest, DraftEntry, onnx.ModelProto]:
    manifest = read_manifest(folder)
    assert manifest.draft is not None
    return manifest, manifest.draft, graphs.load(folder / manifest.draft.template)


def buckets(entry: DraftEntry) -> Iterator[Bucket]:
    """One draft step, a verified batch of several sequences, the longest warm-up."""
    yield Bucket(streams=1, step=1, context=1)
    yield Bucket(streams=3, step=5, context=1, all_rows=True)
    yield Bucket(streams=1, step=entry.ladder.steps[-1], context=1)


@pytest.fixture(
    params=[("csa_only", CHOICES[0]), *(("mixed", choices) for choices in CHOICES)],
    ids=str,
)
def folder(request: pytest.FixtureRequest, bundles: Bundles) -> Path:
    name, choices = request.param
    return bundles.bundle(bundles.checkpoint(name, with_draft=True), **choices)


def test_inputs_and_outputs_are_the_contract(folder: Path) -> None:
    manifest, entry, model = open_draft(folder)
    onnx.checker.check_model(folder / entry.template, full_check=True)
    rows = entry.contract
    config = from_dict(manifest.config)
    assert rows == draft_contract(config, manifest.capacity, manifest.cache_types)
    for values, wanted in (
        (model.graph.input, rows.inputs),
        (model.graph.output, rows.outputs),
    ):
        assert list(graphs.shapes(values).items()) == [(r.name, r.shape) for r in wanted]
        assert graphs.element_types(values) == {r.name: r.dtype.value for r in wanted}


def test_frozen_it_has_numbers_for_shapes_and_rank_4_or_less(folder: Path) -> None:
    _, entry, model = open_draft(folder)
    for bucket in buckets(entry):
        dims = entry.dims(bucket)
        frozen = freeze(model, dims)
        rows = entry.contract
        found = graphs.shapes([*frozen.graph.input, *frozen.graph.output])
        assert found == {r.name: r.resolve(dims) for r in (*rows.inputs, *rows.outputs)}
        inner = graphs.shapes(frozen.graph.value_info).values()
        assert all(isinstance(size, int) for shape in inner for size in shape), bucket.name
        assert max(map(len, inner)) <= 4


def test_its_cache_is_written_before_it_is_read(folder: Path) -> None:
    """Alias safety (DESIGN rule 6), in the template and frozen."""
    _, entry, model = open_draft(folder)
    caches = {spec.name: spec.out_name for spec in entry.contract.caches}
    assert len(caches) == 1
    assert graphs.alias_hazards(model, caches) == []
    for bucket in buckets(entry):
        assert graphs.alias_hazards(freeze(model, entry.dims(bucket)), caches) == []


def test_a_read_of_the_old_rows_is_found(bundles: Bundles) -> None:
    """Broken on purpose: the attention reads the cache input in place of what was written."""
    _, entry, model = open_draft(bundles.bundle(bundles.checkpoint(with_draft=True)))
    (spec,) = entry.contract.caches
    (reader,) = [n for n in graphs.nodes(model, "Gather") if n.input[0] == spec.out_name]
    reader.input[0] = spec.name
    found = graphs.alias_hazards(model, {spec.name: spec.out_name})
    assert found == [graphs.Hazard(spec.name, reader.name)]


Place = tuple[str, str, int, int]


def places(model: onnx.ModelProto) -> dict[str, Place]:
    """File, offset and length of every weight, by name."""
    found = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            place = entries["location"], int(entries["offset"]), int(entries["length"])
            found[tensor.name] = place
    return found


@pytest.mark.parametrize(("dialect", "form"), FORMS)
def test_both_graphs_share_one_weights_file(
    bundles: Bundles, dialect: Dialect, form: WeightType
) -> None:
    """Embedding and head lie in it once, everything else of the block once too, large first.

    Nor does the draft graph use an operator that the main one does not.
    """
    folder = bundles.quant_bundle(dialect, form, with_draft=True)
    manifest, _, model = open_draft(folder)
    template = graphs.load(folder / manifest.template)
    assert graphs.ops(model) <= graphs.ops(template)
    main, draft = places(template), places(model)
    shared = {name for name, place in draft.items() if place in main.values()}
    head = {"head.weight"} if form is WeightType.F32 else {"head.weight", "head.scales"}
    assert shared == {f"mtp.0.{name}" for name in {"embed.weight"} | head}
    assert all(draft[name] == main[name.removeprefix("mtp.0.")] for name in shared)
    assert manifest.weights is not None
    spans = sorted({place[1:] for place in (*main.values(), *draft.values())})
    for (start, size), (after, _) in pairwise(spans):
        assert start + size == after
    assert sum(spans[-1]) == manifest.weights.num_bytes
    sizes = [size for _, size in spans]
    assert sizes == sorted(sizes, reverse=True)
    with safe_open(folder / manifest.weights.file, "numpy") as file:
        assert set(file.keys()) == (main.keys() | draft.keys()) - shared


def loose_ends(folder: Path) -> int:
    """Nodes of the main template that compute what nothing reads."""
    model = graphs.load(folder / read_manifest(folder).template)
    read = graphs.consumers(model).keys() | {value.name for value in model.graph.output}
    return sum(not read & set(node.output) for node in model.graph.node)


@pytest.mark.parametrize("name", ["mixed", "window_only"])
def test_without_the_option_or_the_block_a_bundle_is_as_it_was(
    bundles: Bundles, name: str
) -> None:
    """The same bytes whether the block was left out or never there."""
    never = bundles.bundle(bundles.checkpoint(name), draft=False)
    with_block = bundles.checkpoint(name, with_draft=True)
    left_out = bundles.bundle(with_block, draft=False)
    files = [{p.name: p.read_bytes() for p in f.iterdir()} for f in (never, left_out)]
    assert files[0] == files[1]
    assert "draft.onnx" not in files[0]
    assert read_manifest(never).draft is None
    asked = bundles.bundle(bundles.checkpoint(name))
    assert read_manifest(asked).draft is None
    assert (asked / "template.onnx").read_bytes() == files[0]["template.onnx"]
    assert loose_ends(asked) == loose_ends(bundles.bundle(with_block))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bundle_with_the_block_plans_as_one_without(bundles: Bundles, name: str) -> None:
    """Planners, ladder, layouts, caches and every host row; the main graph gains one result."""
    ours = read_manifest(bundles.bundle(bundles.checkpoint(name, with_draft=True)))
    plain = read_manifest(bundles.bundle(bundles.checkpoint(name)))
    for field in ("planners", "dimensions", "ladder", "layouts", "caches", "capacity"):
        assert getattr(ours, field) == getattr(plain, field), field
    assert ours.contract.inputs == plain.contract.inputs
    names = [row.name for row in ours.contract.outputs]
    assert names.pop(names.index("streams")) == "streams"
    assert names == [row.name for row in plain.contract.outputs]


def raw_manifest(bundles: Bundles) -> dict[str, Any]:
    folder = bundles.bundle(bundles.checkpoint(with_draft=True))
    raw: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return raw


def test_a_manifest_of_before_the_draft_still_reads(bundles: Bundles) -> None:
    raw = raw_manifest(bundles)
    assert raw["format_version"] == 1
    del raw["draft"]
    assert parse_manifest(raw, "here").draft is None


def retype(raw: dict[str, Any]) -> None:
    raw["draft"]["caches"][0]["dtype"] = "float64"


def half(raw: dict[str, Any]) -> None:
    raw["draft"]["caches"][0]["dtype"] = "float16"


def lose(raw: dict[str, Any]) -> None:
    del raw["draft"]["hidden"]["rows"]


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (retype, "here: layer 5 raw cache: no type 'float64'"),
        (half, "here: cache.5.raw: the manifest has "),
        (lose, "field 'draft.hidden.rows'"),
    ],
)
def test_a_damaged_entry_is_refused(
    bundles: Bundles, damage: Callable[[dict[str, Any]], None], fact: str
) -> None:
    raw = raw_manifest(bundles)
    damage(raw)
    with pytest.raises(ContractError) as caught:
        parse_manifest(raw, "here")
    assert fact in str(caught.value)


def test_a_preset_has_the_block_that_its_config_counts(tmp_path: Path) -> None:
    export_preset("deepseek-v4-flash", tmp_path / "flash", static=[])
    manifest, entry, model = open_draft(tmp_path / "flash")
    assert [cache.name for cache in entry.caches] == ["cache.43.raw"]
    assert (entry.hidden.rows, entry.hidden.width) == (manifest.capacity.rewind + 1, 16384)
    places_of = places(model)
    assert places_of["mtp.0.embed.weight"][2] == 129280 * 4096 * 4
