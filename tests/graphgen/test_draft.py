"""The draft graph on CPU ONNX Runtime against the float64 twin of the MTP block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.bundles import BLOCKS, Bundles, open_engine, with_capacity
from support.drafts import DraftWorld, Pairs, draw_pairs
from support.emitted import Array, World, open_session, run
from support.tiny import CONFIGS, random_tensors, tiny_config

from cachegraph.models.cache_types import CacheType
from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind
from cachegraph.models.deepseek_v4.twin_draft import draft_greedy
from cachegraph.models.export_options import Dialect, WeightType
from cachegraph.models.manifest import read_manifest
from cachegraph.runtime.batch import Batch

pytestmark = pytest.mark.r2

CAPACITY = with_capacity(max_step=64)
LENGTH = 59  # pairs: several windows of every config
NEAR = 1e-4  # to the twin
SAME = 1e-5  # between two ways of running the graph
SEED = 1
# The share of the spread of float logits by which rounded ones may be off, on average.
ROUNDED = {WeightType.INT8: 0.1, WeightType.INT4: 0.5}


def weights_of(config: DeepseekV4Config) -> dict[str, Array]:
    return random_tensors(config, SEED, with_draft=True)


def pairs_of(bundles: Bundles, name: str) -> Pairs:
    config = tiny_config(name)
    return bundles.once(
        ("pairs", name), lambda: draw_pairs(config, weights_of(config), LENGTH)
    )


def bundle_of(bundles: Bundles, name: str, **choices: object) -> Path:
    checkpoint = bundles.checkpoint(name, seed=SEED, with_draft=True)
    return bundles.bundle(checkpoint, **{"capacity": CAPACITY, **choices})


def in_parts(folder: Path, pairs: Pairs, ends: Sequence[int]) -> tuple[Array, Array]:
    """Logits and streams of all pairs, run in calls that end at these."""
    world, start, parts = DraftWorld(folder), 0, []
    for end in ends:
        parts.append(world.step({2: (pairs.tokens[start:end], pairs.streams[start:end])})[2])
        start = end
    logits, streams = zip(*parts, strict=True)
    return np.concatenate(logits), np.concatenate(streams)


def assert_like_the_twin(found: tuple[Array, Array], pairs: Pairs) -> None:
    logits, streams = found
    wanted = pairs.draft.streams.reshape(len(streams), -1)
    np.testing.assert_allclose(logits, pairs.draft.logits, rtol=0, atol=NEAR)
    np.testing.assert_allclose(streams, wanted, rtol=0, atol=NEAR)


@pytest.mark.parametrize(("name", "dialect"), list(product(CONFIGS, Dialect)))
def test_all_pairs_at_once(bundles: Bundles, name: str, dialect: Dialect) -> None:
    """More than a window in one call; main layers, hash layers and streams of every sort."""
    pairs = pairs_of(bundles, name)
    assert len(pairs.tokens) > 5 * tiny_config(name).sliding_window
    assert np.abs(pairs.draft.logits).max() > 1
    found = in_parts(bundle_of(bundles, name, dialect=dialect), pairs, [LENGTH])
    assert_like_the_twin(found, pairs)


def test_the_draft_layer_borrows_no_main_layers_settings() -> None:
    """The configs above differ in layers 0 and 1: kind, RoPE and routing (public case A45)."""
    configs = [tiny_config(name) for name in CONFIGS]
    for layer in (0, 1):
        assert {config.layer_kinds[layer] for config in configs} >= {
            LayerKind.WINDOW,
            LayerKind.CSA,
        }
        assert {config.is_hash(layer) for config in configs} == {True, False}


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("name", ["mixed", "csa_only"])
def test_any_split_gives_the_same(bundles: Bundles, name: str, dialect: Dialect) -> None:
    """One at a time, and three random splits."""
    pairs, folder = pairs_of(bundles, name), bundle_of(bundles, name, dialect=dialect)
    whole = in_parts(folder, pairs, [LENGTH])
    rng = np.random.default_rng(7)
    splits = [list(range(1, LENGTH + 1))]
    for _ in range(3):
        cuts = rng.choice(np.arange(1, LENGTH), size=6, replace=False)
        splits.append([*sorted(cuts.tolist()), LENGTH])
    for ends in splits:
        parts = in_parts(folder, pairs, ends)
        assert_like_the_twin(parts, pairs)
        for ours, theirs in zip(parts, whole, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=SAME)


def test_neighbours_change_nothing(bundles: Bundles) -> None:
    """Two sequences in calls padded in both sizes, each as when it is alone."""
    config, folder = tiny_config("mixed"), bundle_of(bundles, "mixed")
    texts = {0: pairs_of(bundles, "mixed")}
    texts[3] = draw_pairs(config, weights_of(config), LENGTH, seed=1)
    texts[1] = draw_pairs(config, weights_of(config), LENGTH, seed=2)
    world, found = DraftWorld(folder), {seq: [] for seq in texts}
    for start, end in ((0, 30), (30, 33), (33, LENGTH)):
        calls = {
            seq: (pairs.tokens[start:end], pairs.streams[start:end])
            for seq, pairs in texts.items()
        }
        for seq, part in world.step(calls).items():
            found[seq].append(part)
    for seq, pairs in texts.items():
        logits, streams = zip(*found[seq], strict=True)
        together = np.concatenate(logits), np.concatenate(streams)
        for ours, theirs in zip(together, in_parts(folder, pairs, [LENGTH]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=SAME)


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("name", ["mixed", "csa_only", "hca_only"])
def test_three_draft_steps_feed_their_own_streams(
    bundles: Bundles, name: str, dialect: Dialect
) -> None:
    """Greedy, from the warm block; then the verified pairs overwrite what was drafted."""
    config, pairs = tiny_config(name), pairs_of(bundles, name)
    drafted, wanted = draft_greedy(
        config, weights_of(config), pairs.streams[:40], pairs.tokens[:40], 3
    )
    world = DraftWorld(bundle_of(bundles, name, dialect=dialect))
    logits, streams = world.step({0: (pairs.tokens[:40], pairs.streams[:40])})[0]
    rows = [logits[-1]]
    for token in drafted[:-1]:
        logits, streams = world.step({0: (np.array([token]), streams[-1:])})[0]
        rows.append(logits[-1])
    np.testing.assert_allclose(np.stack(rows), wanted, rtol=0, atol=NEAR)
    assert np.stack(rows).argmax(axis=1).tolist() == drafted.tolist()
    assert np.abs(wanted[1:] - pairs.draft.logits[40:42]).max() > 0.1, "else nothing is shown"


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("dialect", Dialect)
def test_rounded_weights(bundles: Bundles, dialect: Dialect, form: WeightType) -> None:
    """They build and run, and are near enough to what float weights give."""
    config = tiny_config("mixed", **BLOCKS)
    pairs = bundles.once("pairs of blocks", lambda: draw_pairs(config, weights_of(config), 30))
    folder = bundles.quant_bundle(dialect, form, with_draft=True, capacity=CAPACITY)
    logits, _ = in_parts(folder, pairs, [30])
    off = np.abs(logits - pairs.draft.logits).mean() / pairs.draft.logits.std()
    assert 1e-4 < off < ROUNDED[form]


def test_the_draft_cache_has_the_rows_type(bundles: Bundles) -> None:
    """Half floats are read back as they round: off by more than float noise, and not by much."""
    pairs = pairs_of(bundles, "mixed")
    logits, _ = in_parts(bundle_of(bundles, "mixed", cache=CacheType.F16), pairs, [30, LENGTH])
    assert 1e-5 < np.abs(logits - pairs.draft.logits).max() < 0.01


@pytest.mark.parametrize("dialect", Dialect)
def test_an_engine_that_does_not_draft_decodes_as_ever(
    bundles: Bundles, dialect: Dialect
) -> None:
    text = pairs_of(bundles, "mixed").text
    rows = []
    for draft in (True, False):
        folder = bundle_of(bundles, "mixed", dialect=dialect, draft=draft)
        with open_engine(folder) as engine:
            first = engine.decode(Batch.of(text[:40], logits=[True] * 40))
            rest = engine.decode(
                Batch.of(text[40:], np.arange(40, len(text)), logits=[True] * (len(text) - 40))
            )
        rows.append(np.concatenate([first, rest]))
    np.testing.assert_array_equal(*rows)


def main_outputs(folder: Path, text: NDArray[np.int64]) -> dict[str, Array]:
    """Every output of the main template for a whole text in one call."""
    manifest = read_manifest(folder)
    world = World(
        contract=manifest.contract, planners=manifest.planners, ladder=manifest.ladder
    )
    plan = world.plan({0: text})
    bucket = world.bucket(plan)
    values = run(open_session(folder / manifest.template), world.feeds(plan, bucket))
    rows = [row.name for row in manifest.contract.outputs]
    return dict(zip(rows, values, strict=True))


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("name", ["mixed", "csa_only"])
def test_the_main_graph_gives_its_streams_and_nothing_else_changes(
    bundles: Bundles, name: str, dialect: Dialect
) -> None:
    pairs = pairs_of(bundles, name)
    ours = main_outputs(bundle_of(bundles, name, dialect=dialect), pairs.text)
    plain = main_outputs(bundle_of(bundles, name, dialect=dialect, draft=False), pairs.text)
    size = len(pairs.text)
    streams = ours.pop("streams")[:size]
    wanted = pairs.main.streams.reshape(size, -1)
    np.testing.assert_allclose(streams, wanted, rtol=0, atol=NEAR)
    assert ours.keys() == plain.keys()
    for key, values in ours.items():
        np.testing.assert_array_equal(values, plain[key], err_msg=key)
