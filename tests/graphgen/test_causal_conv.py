"""Causal convolution and gated norm by their emitted graphs, against float64 numpy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from support.emitted import run_emitted
from support.recurrent_layers import Array, Piece, Run, StateHost, conv_piece, conv_twin

from cachegraph.graphgen.freeze import freeze
from cachegraph.graphgen.layers.causal_conv import ConvSizes
from cachegraph.graphgen.layers.gated_norm import GateActivation, GatedNorm
from cachegraph.graphgen.weights.parameter import vector
from cachegraph.models.errors import ConfigError
from cachegraph.models.recurrent_spec import RecurrentSpec

pytestmark = pytest.mark.r2

EXACT = 1e-5
KINDS = {
    "plain": ConvSizes(channels=11, kernel=4),
    "dilated": ConvSizes(channels=11, kernel=4, dilation=3),
    "wide": ConvSizes(channels=5, kernel=3, dilation=5),
    "short": ConvSizes(channels=5, kernel=2),
}
LEVELS = onnxruntime.GraphOptimizationLevel


def random(*shape: int, seed: int = 3) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weight(sizes: ConvSizes) -> Array:
    return random(sizes.channels, 1, sizes.kernel)


@cache
def piece(kind: str, silu: bool = True) -> Piece:
    sizes = KINDS[kind]
    return conv_piece(sizes, weight(sizes), silu=silu)


def session(model: onnx.ModelProto, level: LEVELS = LEVELS.ORT_ENABLE_ALL) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = level
    found = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = {value.name for value in found.get_inputs()}
    return lambda feeds: found.run(None, {name: feeds[name] for name in names})


def host(
    kind: str, lengths: list[int], snapshots: int = 0, run: Run | None = None
) -> StateHost:
    texts = {
        seq: {"x": random(length, KINDS[kind].channels, seed=seq)}
        for seq, length in enumerate(lengths)
    }
    spec, found = RecurrentSpec(snapshots=snapshots), piece(kind)
    runs = run or session(found.model)
    return StateHost(piece=found, spec=spec, texts=texts, run=runs)


def assert_step(world: StateHost, kind: str, counts: dict[int, int], bucket=None) -> None:
    """Outputs of the step, and every kept history: the newest inputs, zeros before the first."""
    sizes, before = KINDS[kind], {seq: world.length(seq) for seq in counts}
    found = world.step(counts, bucket)
    for seq, count in counts.items():
        x = world.texts[seq]["x"]
        wanted = conv_twin(sizes, weight(sizes), x, silu=True)
        old, new = before[seq], before[seq] + count
        np.testing.assert_allclose(found[seq], wanted[old:new], rtol=0, atol=EXACT)
        long = np.concatenate([np.zeros((sizes.history, sizes.channels)), x])
        for length in range(new - world.standings[seq].depth, new + 1):
            rows = long[length : length + sizes.history]
            np.testing.assert_array_equal(world.state(seq, length), rows.ravel())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [[1] * 13, [30], [2, 1, 8, 19], [17, 1, 12]])
def test_any_split_gives_the_same(kind: str, split: list[int]) -> None:
    world = host(kind, [30], snapshots=2)
    for step in split:
        assert_step(world, kind, {0: step})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("snapshots", [0, 1, 8])
def test_streams_of_unlike_lengths_in_a_padded_call(kind: str, snapshots: int) -> None:
    world = host(kind, [30, 30, 30], snapshots)
    assert_step(world, kind, {0: 5, 1: 1, 2: 11}, (4, 16))
    assert_step(world, kind, {2: 2, 0: 4}, (2, 4))
    assert_step(world, kind, {1: 1, 0: 1}, (2, 1))
    assert_step(world, kind, {1: 3, 0: 16, 2: 9}, (4, 16))


def test_rewinding_to_a_snapshot() -> None:
    world = host("dilated", [40], snapshots=4)
    assert_step(world, "dilated", {0: 20})
    world.standings[0] = world.standings[0].rewound(16)
    assert_step(world, "dilated", {0: 9})


def test_without_activation() -> None:
    sizes, plain = KINDS["plain"], piece("plain", silu=False)
    x = random(9, sizes.channels)
    spec, run = RecurrentSpec(snapshots=0), session(plain.model)
    world = StateHost(piece=plain, spec=spec, texts={0: {"x": x}}, run=run)
    wanted = conv_twin(sizes, weight(sizes), x, silu=False)
    np.testing.assert_allclose(world.step({0: 9})[0], wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize("level", [LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_EXTENDED])
def test_lower_optimisation_levels(level: LEVELS) -> None:
    world = host("dilated", [30, 30], run=session(piece("dilated").model, level))
    assert_step(world, "dilated", {0: 11, 1: 2})
    assert_step(world, "dilated", {0: 1, 1: 1})


def test_on_the_reference_evaluator() -> None:
    evaluator = ReferenceEvaluator(piece("dilated").model)
    world = host("dilated", [30, 30], 2, lambda feeds: evaluator.run(None, feeds))
    assert_step(world, "dilated", {0: 11, 1: 2})
    assert_step(world, "dilated", {0: 1, 1: 1})


def test_frozen_graph_is_static_and_the_same() -> None:
    frozen = freeze(piece("dilated").model, {"S": 2, "P": 7, "KR": 3, "rows": 71})
    assert {node.domain for node in frozen.graph.node} == {""}
    assert "Shape" not in {node.op_type for node in frozen.graph.node}
    ranks = [len(v.type.tensor_type.shape.dim) for v in frozen.graph.value_info]
    assert max(ranks) <= 4
    assert_step(host("dilated", [7, 7], 2, session(frozen)), "dilated", {0: 7, 1: 7})


def test_the_cache_is_written_after_its_rows_are_read() -> None:
    nodes = piece("plain").model.graph.node
    assert sorted(n.op_type for n in nodes if "cache" in n.input) == ["Gather", "ScatterND"]


@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (4, 0)])
def test_sizes_without_history_are_refused(kernel: int, dilation: int) -> None:
    with pytest.raises(ConfigError, match=f"of {kernel} taps, {dilation} tokens apart"):
        ConvSizes(channels=4, kernel=kernel, dilation=dilation)


@pytest.mark.parametrize("activation", GateActivation)
def test_gated_norm(tmp_path: Path, activation: GateActivation) -> None:
    """The norm per head, its plain weight, and a gate that is not normed."""
    x, gate = random(2, 5, 3, 7) * 4, random(2, 5, 21, seed=4)
    w = random(7, seed=5)
    norm = GatedNorm(vector("w", 7), 21, 1e-2, activation)
    feeds = {"x": x, "gate": gate}
    (ours,) = run_emitted(
        tmp_path, lambda op, v: [norm(op, v["x"], v["gate"])], feeds, {"w": w}.__getitem__
    )
    rms = np.sqrt((x.astype(float) ** 2).mean(-1, keepdims=True) + 1e-2)
    opened = 1 / (1 + np.exp(-gate.astype(float)))
    if activation is GateActivation.SILU:
        opened = opened * gate
    wanted = (x / rms * w).reshape(2, 5, 21) * opened
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=EXACT)
