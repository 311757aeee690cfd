"""Routing is computed, not frozen: other inputs use other experts, the ones the twin says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file
from support import graphs
from support.bundles import Bundles
from support.emitted import World, open_session, run
from support.tiny import random_checkpoint, random_tensors

from cachegraph.graphgen import export
from cachegraph.models.deepseek_v4.serial import from_dict
from cachegraph.models.deepseek_v4.twin import forward
from cachegraph.models.errors import CheckpointError
from cachegraph.models.export_options import Dialect
from cachegraph.models.manifest import Manifest, read_manifest

pytestmark = pytest.mark.r2


def with_choices(folder: Path, manifest: Manifest, out: Path) -> list[str]:
    """Write the template with each layer's chosen experts [T, K] as outputs; their names."""
    model = graphs.load(folder / manifest.template)
    routers = [
        node
        for node in graphs.nodes(model, "GatherElements")
        if not node.input[0].startswith("plan.")
    ]
    names = [node.input[1] for node in routers]
    for name in names:
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None)
        )
    onnx.save(model, out)
    return names


@pytest.mark.parametrize("dialect", Dialect)
def test_two_inputs_use_different_experts(bundles: Bundles, dialect: Dialect) -> None:
    folder = bundles.bundle(bundles.checkpoint(), dialect=dialect)
    manifest = read_manifest(folder)
    config = from_dict(manifest.config)
    path = folder / "choices.onnx"
    layers = with_choices(folder, manifest, path)
    assert len(layers) == config.num_layers
    session = open_session(path)
    weights = random_tensors(config, seed=1)
    chosen = []
    for seed in (1, 2):
        tokens = np.random.default_rng(seed).integers(config.vocab_size, size=16)
        world = World(
            contract=manifest.contract, planners=manifest.planners, ladder=manifest.ladder
        )
        plan = world.plan({0: tokens.tolist()})
        columns = run(session, world.feeds(plan, world.bucket(plan)))[-len(layers) :]
        twin = forward(config, weights, tokens)
        assert twin.smallest_gap > 1e-5
        for ours, wanted in zip(columns, twin.layers, strict=True):
            assert np.sort(ours[:16]).tolist() == np.sort(wanted.experts).tolist()
        chosen.append(np.stack([ours[:16] for ours in columns]))
    differing = (np.sort(chosen[0]) != np.sort(chosen[1])).any(axis=(1, 2))
    assert differing.all(), "a layer chose the same experts for both inputs"


def test_a_hash_table_that_names_an_expert_twice_is_refused(tmp_path: Path) -> None:
    """The fused expert layers would lose one of the two weights."""
    folder = random_checkpoint(tmp_path / "checkpoint", name="mixed")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    table = tensors["layers.0.ffn.gate.tid2eid"]
    table[7, 1] = table[7, 0]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tid2eid: token 7 names an expert twice"):
        export(folder, tmp_path / "out", static=[])
    assert not (tmp_path / "out").exists()
