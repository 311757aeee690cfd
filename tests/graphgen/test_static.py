"""The template with free dimensions set at load equals the frozen graph of the same bucket.

Both run the steps of a real plan, padding and all, on the same weights file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import graphs
from support.bundles import Bundles, with_capacity
from support.emitted import Array, HybridWorld, World, open_session, run
from support.qwen4_exp import CONFIGS as QWEN_CONFIGS
from support.tiny import CONFIGS

from cachegraph.graphgen.freeze import freeze
from cachegraph.graphgen.static import StaticSize, freeze_bundle
from cachegraph.models.buckets import Bucket
from cachegraph.models.export_options import Dialect, Select, WeightType
from cachegraph.models.manifest import Manifest, read_manifest

pytestmark = pytest.mark.r2

# Sequences and tokens of each: a prefill, then one call in which no block closes.
CALLS = ((0, 2), 21), ((2,), 1)


def world_of(manifest: Manifest) -> World:
    parts = {
        "contract": manifest.contract,
        "planners": manifest.planners,
        "ladder": manifest.ladder,
    }
    if manifest.planners.recurrent is None:
        return World(**parts)
    return HybridWorld(**parts, capacity=manifest.capacity)


def planned(
    world: World, manifest: Manifest
) -> Iterator[tuple[Bucket, dict[str, Array], Callable[[list[Array]], None]]]:
    """Bucket and feeds of each call; the third value takes the outputs and commits them."""
    rng = np.random.default_rng(2)
    for streams, step in CALLS:
        tokens = {seq: rng.integers(manifest.vocab_size, size=step) for seq in streams}
        plan = world.plan(tokens)
        bucket = world.bucket(plan)

        def commit(outputs: list[Array], plan=plan) -> None:
            names = [row.name for row in manifest.contract.outputs]
            found = dict(zip(names, outputs, strict=True))
            caches = {s.name: found[s.out_name] for s in manifest.contract.caches}
            world.commit(plan, caches)

        yield bucket, world.feeds(plan, bucket), commit


@pytest.mark.parametrize(
    ("name", "dialect"), [*((n, Dialect.PORTABLE) for n in CONFIGS), ("mixed", Dialect.ORT)]
)
def test_overridden_template_equals_the_frozen_graph(
    bundles: Bundles, name: str, dialect: Dialect
) -> None:
    """Every output of every call, caches included, to 1e-6."""
    compare(bundles.bundle(bundles.checkpoint(name), dialect=dialect))


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        *((name, {}) for name in QWEN_CONFIGS),
        ("six", {"select": Select.MASK}),
        ("six", {"dialect": Dialect.ORT}),
        ("ngrams", {"dialect": Dialect.ORT, "capacity": with_capacity(rewind=0)}),
    ],
)
def test_hybrid_graphs_freeze_too(
    bundles: Bundles, name: str, choices: dict[str, object]
) -> None:
    """With snapshots and without, in either selection."""
    compare(bundles.bundle(bundles.qwen_checkpoint(name), **choices))


@pytest.mark.parametrize(
    ("dialect", "weights"),
    [(Dialect.ORT, WeightType.INT8), (Dialect.PORTABLE, WeightType.INT4)],
)
def test_quantised_graphs_freeze_too(
    bundles: Bundles, dialect: Dialect, weights: WeightType
) -> None:
    compare(bundles.quant_bundle(dialect, weights))
    compare(bundles.quant_qwen_bundle(dialect, weights))


def compare(folder: Path) -> None:
    manifest = read_manifest(folder)
    template = graphs.load(folder / manifest.template)
    world = world_of(manifest)
    names = [row.name for row in manifest.contract.outputs]
    for bucket, feeds, commit in planned(world, manifest):
        dims = manifest.dims(bucket)
        path = folder / f"{bucket.name}.test.onnx"
        onnx.save(freeze(template, dims), path)
        frozen = run(open_session(path), feeds)
        overridden = run(open_session(folder / manifest.template, dims), feeds)
        for output, ours, theirs in zip(names, frozen, overridden, strict=True):
            finite = np.nan_to_num(ours, neginf=-1e9), np.nan_to_num(theirs, neginf=-1e9)
            message = f"{bucket.name} {output}"
            np.testing.assert_allclose(*finite, rtol=0, atol=1e-6, err_msg=message)
            assert np.isfinite(ours).all() or output.endswith("_state.out"), message
        commit(frozen)
        path.unlink()


def test_static_graphs_of_a_bundle_run_on_its_weights_file(bundles: Bundles) -> None:
    """Written at export and added later: same names, same numbers as the template."""
    sizes = [StaticSize(1, 4, 16), StaticSize(2, 1, 32)]
    folder = bundles.bundle(bundles.checkpoint(), static=sizes[:1])
    added = freeze_bundle(folder, sizes)
    manifest = read_manifest(folder)
    assert list(manifest.graphs) == added
    assert [graph.bucket.name for graph in added] == [
        "s1_p4_n16_csa_hca",
        "s2_p1_n32_csa_hca",
    ]
    world = world_of(manifest)
    tokens = np.random.default_rng(3).integers(manifest.vocab_size, size=(2, 4))
    for graph in added:
        streams = range(graph.bucket.streams)
        now = {seq: tokens[seq][: graph.bucket.step] for seq in streams}
        assert graph.dims == manifest.dims(graph.bucket)
        feeds = world.feeds(world.plan(now, all_logits=False), graph.bucket)
        frozen = run(open_session(folder / graph.file), feeds)
        free = run(open_session(folder / manifest.template), feeds)
        for ours, theirs in zip(frozen, free, strict=True):
            np.testing.assert_allclose(
                np.nan_to_num(ours, neginf=-1e9),
                np.nan_to_num(theirs, neginf=-1e9),
                rtol=0,
                atol=1e-6,
            )
