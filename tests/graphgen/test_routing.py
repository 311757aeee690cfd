"""Routing is computed, not frozen: other inputs use other experts, the ones the twin says.

An expert that was chosen with a weight of 0 adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxscript import OpBuilder
from safetensors.numpy import load_file, save_file
from support import graphs
from support.bundles import Bundles
from support.emitted import Values, World, open_session, run, run_emitted
from support.tiny import random_checkpoint, random_tensors

from cachegraph.graphgen import export
from cachegraph.graphgen.layers.experts import ExpertSizes, expert_layer
from cachegraph.graphgen.layers.routing import Routing
from cachegraph.models.deepseek_v4.serial import from_dict
from cachegraph.models.deepseek_v4.twin import forward
from cachegraph.models.errors import CheckpointError
from cachegraph.models.export_options import Dialect, ExportOptions, WeightType
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


@dataclass(frozen=True, slots=True)
class Names:
    """Matrices of every expert by name."""

    def gate_up(self, expert: int) -> list[str]:
        return [f"gate.{expert}", f"up.{expert}"]

    def down(self, expert: int) -> str:
        return f"down.{expert}"


@pytest.mark.parametrize(("dialect", "weights"), list(product(Dialect, WeightType)))
def test_a_chosen_expert_of_weight_0_adds_nothing(
    dialect: Dialect, weights: WeightType, tmp_path: Path
) -> None:
    """A softmax may give that where scores lie far apart."""
    experts, chosen, hidden, inner = 9, 5, 64, 32
    sizes = ExpertSizes(hidden=hidden, inner=inner, count=experts, chosen=chosen, limit=None)
    layer = expert_layer(sizes, Names(), ExportOptions(dialect=dialect, weights=weights))
    rng = np.random.default_rng(3)
    matrices = {
        name: rng.standard_normal((inner, hidden)[:: -1 if "down" in name else 1]) / 8
        for expert in range(experts)
        for name in (*Names().gate_up(expert), Names().down(expert))
    }
    x = rng.standard_normal((1, hidden)).astype(np.float32)
    logits = np.array([[0, 4, 1, -2, -1, 400, 399, -3, -4]], np.float32)
    scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    columns = np.array([[5, 6, 1, 2, 0]])
    feeds = {
        "x": x,
        "scores": scores,
        "columns": columns,
        "weights": np.take_along_axis(scores, columns, axis=1),
        "tokens": np.array([1]),
    }
    assert (feeds["weights"] == 0).sum() == 3

    def emit(op: OpBuilder, values: Values) -> list[ir.Value]:
        _, *routing = values.values()
        return [layer(op, values["x"], Routing(*routing, experts))]

    (ours,) = run_emitted(
        tmp_path, emit, feeds, lambda name: matrices[name].astype(np.float32)
    )
    wanted = np.zeros(hidden)
    for expert in (5, 6):
        gate, up, down = (matrices[f"{part}.{expert}"] for part in ("gate", "up", "down"))
        a = gate @ x[0]
        wanted += scores[0, expert] * (down @ (a / (1 + np.exp(-a)) * (up @ x[0])))
    bound = {WeightType.F32: 1e-5, WeightType.INT4: 0.2}.get(weights, 0.04)
    np.testing.assert_allclose(ours[0], wanted, rtol=0, atol=bound)
    assert np.abs(wanted).max() > 0.3
