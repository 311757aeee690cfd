"""Alias safety (DESIGN rule 6): in every graph the write of a cache waits for every old read."""

from __future__ import annotations

from itertools import product

import onnx
import pytest
from support import graphs
from support.bundles import Bundles, with_capacity
from support.qwen4_exp import CONFIGS as QWEN_CONFIGS
from support.tiny import CONFIGS

from cachegraph.graphgen.freeze import freeze
from cachegraph.models.buckets import Bucket
from cachegraph.models.export_options import Dialect, Experts, RowRead, RowWrite, Select
from cachegraph.models.manifest import Manifest, read_manifest

pytestmark = pytest.mark.r1


def graph_and_caches(
    bundles: Bundles, name: str = "mixed", **choices: object
) -> tuple[onnx.ModelProto, dict[str, str], Manifest]:
    make = bundles.qwen_checkpoint if name in QWEN_CONFIGS else bundles.checkpoint
    folder = bundles.bundle(make(name), **choices)
    manifest = read_manifest(folder)
    caches = {spec.name: spec.out_name for spec in manifest.contract.caches}
    return graphs.load(folder / manifest.template), caches, manifest


@pytest.mark.parametrize(
    ("name", "dialect"), list(product((*CONFIGS, *QWEN_CONFIGS), Dialect))
)
def test_templates(bundles: Bundles, name: str, dialect: Dialect) -> None:
    model, caches, _ = graph_and_caches(bundles, name, dialect=dialect)
    assert len(caches) > 0
    assert graphs.alias_hazards(model, caches) == []


@pytest.mark.parametrize("name", ["mixed", "six"])
@pytest.mark.parametrize(
    "choices",
    [
        {"gather": RowRead.ELEMENTS},
        {"gather": RowRead.ND},
        {"scatter": RowWrite.ELEMENTS},
        {"select": Select.MASK},
        {"experts": Experts.ALL},
    ],
    ids=str,
)
def test_lowerings(bundles: Bundles, name: str, choices: dict[str, object]) -> None:
    model, caches, _ = graph_and_caches(bundles, name, **choices)
    assert graphs.alias_hazards(model, caches) == []


def test_the_fused_rule(bundles: Bundles) -> None:
    choices = {"dialect": Dialect.ORT, "capacity": with_capacity(rewind=0)}
    model, caches, _ = graph_and_caches(bundles, "ngrams", **choices)
    assert graphs.alias_hazards(model, caches) == []


def test_static_hybrid_graphs(bundles: Bundles) -> None:
    model, caches, manifest = graph_and_caches(bundles, "ngrams")
    for bucket in (
        Bucket(streams=1, step=1, context=manifest.ladder.contexts[0]),
        Bucket(streams=2, step=4, context=manifest.ladder.contexts[-1]),
    ):
        assert graphs.alias_hazards(freeze(model, manifest.dims(bucket)), caches) == []


@pytest.mark.parametrize("closing", [False, True])
def test_static_graphs(bundles: Bundles, closing: bool) -> None:
    model, caches, manifest = graph_and_caches(bundles)
    kinds = tuple(spec.kind for spec in manifest.planners.compressors) if closing else ()
    bucket = Bucket(streams=2, step=4, context=16, closes=kinds)
    assert graphs.alias_hazards(freeze(model, manifest.dims(bucket)), caches) == []


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *(("mixed", f"cache.{kind}") for kind in ("1.raw", "1.csa", "2.hca", "1.lid")),
        *(("plain", f"cache.3.{kind}") for kind in ("keys", "values", "index", "pooled")),
    ],
)
def test_a_read_of_the_old_rows_is_found(bundles: Bundles, name: str, cache: str) -> None:
    """Broken on purpose: the attention reads the cache input in place of what was written."""
    model, caches, _ = graph_and_caches(bundles, name)
    (reader, *_) = [
        node for node in graphs.nodes(model, "Gather") if node.input[0] == caches[cache]
    ]
    reader.input[0] = cache
    assert graphs.alias_hazards(model, caches) == [graphs.Hazard(cache, reader.name)]


@pytest.mark.parametrize(
    "cache", ["cache.1.csa_state", "cache.2.hca_state", "cache.3.lid_state"]
)
def test_a_state_write_that_does_not_wait_is_found(bundles: Bundles, cache: str) -> None:
    """Broken on purpose: persisted rows come from the step's rows, not the source table."""
    model, caches, _ = graph_and_caches(bundles)
    maker = {name: node for node in model.graph.node for name in node.output}
    kept = maker[maker[caches[cache]].input[2]]
    table = maker[kept.input[0]]
    carried, rows = table.input
    kept.input[0] = rows
    hazard = graphs.Hazard(cache, maker[carried].name)
    assert graphs.alias_hazards(model, caches) == [hazard]


@pytest.mark.parametrize("kind", ["ngram_state", "conv_state", "recurrent_state"])
def test_a_recurrent_write_that_does_not_wait_is_found(bundles: Bundles, kind: str) -> None:
    """Broken on purpose: the kept states are cut loose from the state before the step."""
    model, caches, _ = graph_and_caches(bundles, "plain")
    cache = f"cache.1.{kind}"
    (reader,) = [n for n in graphs.consumers(model)[cache] if n.op_type == "Gather"]
    (write,) = [n for n in model.graph.node if caches[cache] in n.output]
    write.input[2] = "cut.loose"
    assert graphs.alias_hazards(model, caches) == [graphs.Hazard(cache, reader.name)]
