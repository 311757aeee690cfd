"""The gated delta rule by its emitted graphs, against the float64 recurrence."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from support.recurrent_layers import (
    Array,
    Feeds,
    Piece,
    Run,
    StateHost,
    delta_piece,
    delta_text,
    delta_twin,
)

from cachegraph.graphgen.freeze import freeze
from cachegraph.graphgen.layers.gated_delta import (
    ChunkedDelta,
    DeltaSizes,
    FusedDelta,
    gated_delta,
)
from cachegraph.models.errors import ConfigError
from cachegraph.models.export_options import Dialect
from cachegraph.models.recurrent_spec import RecurrentSpec

pytestmark = pytest.mark.r2

SIZES = DeltaSizes(key_heads=3, value_heads=6, key_dim=10, value_dim=7)
EXACT = 1e-5  # relative to the largest value
LEVELS = onnxruntime.GraphOptimizationLevel
ALL_LEVELS = (
    LEVELS.ORT_DISABLE_ALL,
    LEVELS.ORT_ENABLE_BASIC,
    LEVELS.ORT_ENABLE_EXTENDED,
    LEVELS.ORT_ENABLE_ALL,
)


@cache
def chunked(max_step: int = 64) -> Piece:
    return delta_piece(ChunkedDelta(SIZES, max_step))


@cache
def fused() -> Piece:
    return delta_piece(FusedDelta(SIZES))


def session(model: onnx.ModelProto, level: LEVELS = LEVELS.ORT_ENABLE_ALL) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = level
    found = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = {value.name for value in found.get_inputs()}
    return lambda feeds: found.run(None, {name: feeds[name] for name in names})


@cache
def run(max_step: int = 64) -> Run:
    return session(chunked(max_step).model)


@cache
def run_fused() -> Run:
    return session(fused().model)


def assert_near(ours: Array, wanted: Array) -> None:
    wanted = wanted.reshape(ours.shape)
    bound = EXACT * max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=bound)


def host(piece: Piece, run: Run, texts: dict[int, Feeds], snapshots: int = 0) -> StateHost:
    spec = RecurrentSpec(snapshots=snapshots)
    return StateHost(piece=piece, spec=spec, texts=texts, run=run)


def assert_step(world: StateHost, counts: dict[int, int], bucket=None) -> None:
    """Outputs of the step, and every kept state, against the recurrence from the start."""
    before = {seq: world.length(seq) for seq in counts}
    found = world.step(counts, bucket)
    for seq, count in counts.items():
        wanted, states = delta_twin(SIZES, world.texts[seq])
        old, new = before[seq], before[seq] + count
        assert_near(found[seq], wanted[old:new])
        for length in range(new - world.standings[seq].depth, new + 1):
            assert_near(world.state(seq, length), states[length])


@pytest.mark.parametrize("step", [1, 2, 3, 7, 16, 31, 33, 64])
@pytest.mark.parametrize("snapshots", [0, 3, 8])
def test_a_step_with_its_kept_states(step: int, snapshots: int) -> None:
    texts = {0: delta_text(SIZES, step)}
    assert_step(host(chunked(), run(), texts, snapshots), {0: step})


@pytest.mark.parametrize("step", [1, 5, 63, 64, 65, 128, 129, 130])
def test_steps_longer_than_a_block(step: int) -> None:
    texts = {seq: delta_text(SIZES, step, seq) for seq in range(2)}
    assert_step(host(chunked(130), run(130), texts, 4), {0: step, 1: max(1, step - 3)})


@pytest.mark.parametrize("max_step", [1, 2, 5])
def test_short_longest_steps(max_step: int) -> None:
    for step in range(1, max_step + 1):
        texts = {0: delta_text(SIZES, step)}
        assert_step(host(chunked(max_step), run(max_step), texts, 8), {0: step})


@pytest.mark.parametrize("snapshots", range(9))
def test_streams_of_unlike_lengths_in_a_padded_call(snapshots: int) -> None:
    """Three streams in a bucket of four, of 5, 1 and 11 tokens in 16; then on from their states."""
    texts = {seq: delta_text(SIZES, 30, seq) for seq in range(3)}
    world = host(chunked(), run(), texts, snapshots)
    assert_step(world, {0: 5, 1: 1, 2: 11}, (4, 16))
    assert_step(world, {2: 2, 0: 4}, (2, 4))
    assert_step(world, {1: 1, 0: 1}, (2, 1))
    assert_step(world, {1: 3, 0: 16, 2: 9}, (4, 16))


def test_fused_streams_of_unlike_lengths_in_a_padded_call() -> None:
    texts = {seq: delta_text(SIZES, 30, seq) for seq in range(3)}
    world = host(fused(), run_fused(), texts)
    assert_step(world, {0: 5, 1: 1, 2: 11}, (4, 16))
    assert_step(world, {2: 2, 0: 4}, (2, 4))
    assert_step(world, {1: 1, 0: 1}, (2, 1))


def lowerings() -> Iterator[tuple[Piece, Run]]:
    yield chunked(130), run(130)
    yield fused(), run_fused()


@pytest.mark.parametrize("split", [[1] * 20, [130], [64, 66], [7, 1, 1, 90, 31], [65, 1, 64]])
def test_any_split_gives_the_same(split: list[int]) -> None:
    texts = {0: delta_text(SIZES, 130)}
    for piece, runs in lowerings():
        world = host(piece, runs, texts)
        for step in split:
            assert_step(world, {0: step})


def test_no_drift_over_500_steps() -> None:
    text = delta_text(SIZES, 500)
    text["g"] /= 50  # states of the start still count at the end
    wanted, states = delta_twin(SIZES, text)
    for piece, runs in lowerings():
        world = host(piece, runs, {0: text})
        found = np.concatenate([world.step({0: 1})[0] for _ in range(500)])
        assert_near(found, wanted)
        assert_near(world.state(0, 500), states[500])


@pytest.mark.parametrize("gate", [0.0, -20.0, -1e4])
@pytest.mark.parametrize("beta", [0.0, 1e-6, 1.0])
def test_no_decay_and_all_but_complete_decay(gate: float, beta: float) -> None:
    text = delta_text(SIZES, 130)
    text["g"][:], text["beta"][:] = gate, beta
    for piece, runs in lowerings():
        assert_step(host(piece, runs, {0: text}), {0: 130})


def test_weak_decays_after_strong_ones() -> None:
    """Sums from the start are -2000 by then: their differences have 3 digits left."""
    text = delta_text(SIZES, 130)
    text["g"][:] = -1e-3
    text["g"][:100] = -20.0
    assert_step(host(chunked(130), run(130), {0: text}), {0: 130})


@pytest.mark.parametrize("step", [64, 130])
def test_a_key_that_repeats(step: int) -> None:
    """As in a text of one token: powers of the triangular matrix would reach 1e18."""
    text = delta_text(SIZES, step)
    text["k"][:], text["beta"][:], text["g"][:] = text["k"][0], 1.0, 0.0
    assert_step(host(chunked(130), run(130), {0: text}, 8), {0: step})


def test_rewinding_to_a_snapshot() -> None:
    texts = {0: delta_text(SIZES, 40)}
    world = host(chunked(), run(), texts, 4)
    assert_step(world, {0: 20})
    world.standings[0] = world.standings[0].rewound(17)
    assert_step(world, {0: 9})


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_every_optimisation_level(level: LEVELS) -> None:
    for piece in (chunked(130), fused()):
        texts = {seq: delta_text(SIZES, 90, seq) for seq in range(2)}
        world = host(piece, session(piece.model, level), texts)
        assert_step(world, {0: 1, 1: 1})
        assert_step(world, {0: 70, 1: 33})


@pytest.mark.parametrize("max_step", [64, 130])
def test_portable_graph_on_the_reference_evaluator(max_step: int) -> None:
    evaluator = ReferenceEvaluator(chunked(max_step).model)
    texts = {seq: delta_text(SIZES, 80, seq) for seq in range(2)}
    world = host(chunked(max_step), lambda feeds: evaluator.run(None, feeds), texts, 2)
    assert_step(world, {0: 9, 1: 33})
    assert_step(world, {0: 1, 1: 1})
    if max_step > 64:
        assert_step(world, {0: 70}, (1, 70))


@pytest.mark.parametrize("steps", [1, 16, 100])
def test_frozen_graph_is_static_and_the_same(steps: int) -> None:
    """Plain operators, no control flow, rank 4 or less, every shape a number."""
    onnx.checker.check_model(chunked(130).model, full_check=True)
    sizes = {"S": 2, "P": steps, "KR": min(steps, 4), "rows": 73}
    frozen = freeze(chunked(130).model, sizes)
    assert {node.domain for node in frozen.graph.node} == {""}
    assert not {"Loop", "Scan", "If", "Shape"} & {node.op_type for node in frozen.graph.node}
    ranks = [len(v.type.tensor_type.shape.dim) for v in frozen.graph.value_info]
    assert max(ranks) <= 4
    texts = {seq: delta_text(SIZES, steps, seq) for seq in range(2)}
    world = host(chunked(130), session(frozen), texts, 3)
    assert world.cache.shape[0] == sizes["rows"]
    assert_step(world, dict.fromkeys(range(2), steps))


def test_the_cache_is_written_after_its_rows_are_read() -> None:
    for piece in (chunked(), fused()):
        readers = [n.op_type for n in piece.model.graph.node if "cache" in n.input]
        assert sorted(readers) == ["Gather", "ScatterND"]


def test_which_lowering_is_chosen() -> None:
    plain = gated_delta(SIZES, Dialect.PORTABLE, snapshots=0, max_step=512)
    assert plain == ChunkedDelta(SIZES, 512)
    assert gated_delta(SIZES, Dialect.ORT, snapshots=0, max_step=9999) == FusedDelta(SIZES)
    kept = gated_delta(SIZES, Dialect.ORT, snapshots=1, max_step=64)
    assert kept == ChunkedDelta(SIZES, 64)
    with pytest.raises(ConfigError, match=r"steps of 513 tokens.*512 at most.*max_step"):
        gated_delta(SIZES, Dialect.PORTABLE, snapshots=0, max_step=513)
    with pytest.raises(ConfigError, match="7 value heads are no multiple of 3"):
        DeltaSizes(key_heads=3, value_heads=7, key_dim=4, value_dim=4)
