"""Stateless parts, each by calling its emitted graph, against the float64 twin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from support.bundles import BLOCKS
from support.emitted import run_emitted
from support.tiny import random_tensors, tiny_config

from cachegraph.graphgen.deepseek_v4.hyper import HyperConnection, HyperHead, merge
from cachegraph.graphgen.deepseek_v4.model import (
    ExpertNames,
    FeedForward,
    SharedExpert,
    expert_sizes,
)
from cachegraph.graphgen.deepseek_v4.output import GroupedOutput
from cachegraph.graphgen.deepseek_v4.router import Router
from cachegraph.graphgen.layers import experts as expert_forms
from cachegraph.graphgen.layers.experts import expert_layer
from cachegraph.graphgen.layers.linear import linear
from cachegraph.graphgen.layers.norm import RMSNorm
from cachegraph.graphgen.layers.rope import rope_table, rotate, rotation_matrix
from cachegraph.graphgen.layers.routing import Routing
from cachegraph.graphgen.weights.parameter import vector
from cachegraph.graphgen.weights.quantise import dequantise, quantise
from cachegraph.models.deepseek_v4 import twin_parts as twin
from cachegraph.models.deepseek_v4.config import DeepseekV4Config, Rope
from cachegraph.models.deepseek_v4.rope import inverse_frequencies
from cachegraph.models.export_options import Dialect, Experts, ExportOptions, WeightType

pytestmark = pytest.mark.r2

T = 9
EXACT = 1e-5  # f32 rounding of sums of about 100 terms of order 1
# Activations are rounded to int8 per block of 32: half a step of 1/127 of the block's largest,
# averaged over a row; relative to the largest result.
ROUNDED_INPUTS = 0.02
FLOATS = np.float32


@dataclass(frozen=True, slots=True)
class Model:
    """A config, its random tensors, and the twin's view of one layer."""

    config: DeepseekV4Config
    tensors: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, name: str = "mixed", **sizes: object) -> Model:
        config = tiny_config(name, **sizes)
        return cls(config, random_tensors(config, seed=2))

    def layer(self, layer: int, under: str) -> twin.Tensors:
        return twin.Tensors(self.tensors).under(f"layers.{layer}").under(under)

    def random(self, *shape: int, seed: int = 7) -> NDArray[np.float32]:
        return np.random.default_rng(seed).standard_normal(shape).astype(FLOATS)


def assert_near(ours: NDArray[Any], wanted: NDArray[Any], bound: float = EXACT) -> None:
    """Absolute, in units of the largest value wanted where that is above 1."""
    assert ours.shape == wanted.shape
    scale = max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=bound * scale)


def test_weighted_norm(tmp_path: Path) -> None:
    model = Model.of()
    name = "layers.0.attn_norm.weight"
    norm = RMSNorm(vector(name, 40), 1e-6)
    x = model.random(T, 40) * np.logspace(-3, 2, T, dtype=FLOATS)[:, None]
    (ours,) = run_emitted(
        tmp_path, lambda op, v: [norm(op, v["x"])], {"x": x}, model.tensors.__getitem__
    )
    wanted = twin.rms_norm(x.astype(float), 1e-6, model.tensors[name].astype(float))
    assert_near(ours, wanted)


@pytest.mark.parametrize("width", [10, 26])
@pytest.mark.parametrize("sign", [1, -1])
def test_rope_on_rows_of_heads(tmp_path: Path, width: int, sign: int) -> None:
    """The last 10 channels turn, forward and back; with width 10 there are no others."""
    rope = Rope(theta=160000.0, factor=4.0, original_context=48, beta_fast=8.0)
    x = Model.of().random(T, 3, width)
    positions = np.array([0, 1, 2, 5, 130, 131, 900, 4095, 3], np.int64)
    frequencies = np.repeat(inverse_frequencies(rope, 10), 2)[None].astype(FLOATS)
    feeds = {"x": x, "p": positions, "f": frequencies, "r": rotation_matrix(10)}

    def emit(op, v):
        table = rope_table(op, v["p"], v["f"], v["r"], 10).per_head(op)
        return [rotate(op, v["x"], table if sign > 0 else table.inverse(op), width)]

    (ours,) = run_emitted(tmp_path, emit, feeds, {}.__getitem__)
    angles = sign * np.outer(positions, twin.inverse_frequencies(rope, 10))
    # f32 angles of thousands of radians are good to about 1e-4.
    assert_near(ours, twin.rotate(x.astype(float), angles), 3e-4)
    assert_near(ours[:4], twin.rotate(x.astype(float), angles)[:4])


@pytest.mark.parametrize("name", ["mixed", "csa_only"])
@pytest.mark.parametrize("site", ["hc_attn", "hc_ffn"])
def test_hyper_connection(tmp_path: Path, name: str, site: str) -> None:
    """The collapse into a site, Sinkhorn in it, and the merge of its output."""
    model = Model.of(name)
    config = model.config
    connection = HyperConnection(config, f"layers.1.{site}")
    streams = model.random(T, config.hc_mult, config.hidden_size)
    out = model.random(T, config.hidden_size, seed=8)

    def emit(op, v):
        x, mix = connection(op, v["streams"])
        return [x, mix.post, mix.comb, merge(op, v["streams"], v["out"], mix)]

    feeds = {"streams": streams, "out": out}
    x, post, comb, merged = run_emitted(tmp_path, emit, feeds, model.tensors.__getitem__)
    tensors = twin.Tensors(model.tensors).under("layers.1")
    wanted = twin.hyper_weights(config, tensors, site, streams.astype(float))
    assert_near(x, twin.hyper_input(wanted, streams.astype(float)))
    assert_near(post[..., 0], wanted.post)
    assert_near(comb.transpose(0, 2, 1), wanted.comb)  # the graph keeps [T, to, from]
    # Rounding averages out; an eps left out of the last division (1e-6) would not.
    assert abs(comb.sum(axis=2, dtype=float).mean() - wanted.comb.sum(axis=1).mean()) < 3e-7
    assert_near(
        merged, twin.hyper_output(wanted, streams.astype(float), out.astype(float)), 2e-5
    )


def test_sinkhorn_columns_come_last(tmp_path: Path) -> None:
    """With few rounds rows are not yet 1, so that a transposed comb cannot pass above."""
    model = Model.of("ratios")
    connection = HyperConnection(model.config, "layers.0.hc_attn")
    streams = model.random(T, 4, 60)
    feeds = {"streams": streams}
    (comb,) = run_emitted(
        tmp_path,
        lambda op, v: [connection(op, v["streams"])[1].comb],
        feeds,
        model.tensors.__getitem__,
    )
    np.testing.assert_allclose(comb.sum(axis=2), 1, atol=1e-5)  # over sources, for each target
    assert np.abs(comb.sum(axis=1) - 1).max() > 1e-4


def test_hyper_head(tmp_path: Path) -> None:
    model = Model.of()
    head = HyperHead(model.config, "hc_head")
    streams = model.random(T, 4, 40)
    (ours,) = run_emitted(
        tmp_path,
        lambda op, v: [head(op, v["x"])],
        {"x": streams},
        model.tensors.__getitem__,
    )
    wanted = twin.hyper_head(model.config, twin.Tensors(model.tensors), streams.astype(float))
    assert_near(ours, wanted)


@pytest.mark.parametrize("layer", [0, 2], ids=["hash", "scores"])
def test_router(tmp_path: Path, layer: int) -> None:
    """The same experts in the same order, weights that sum to 1, scores without the bias."""
    model = Model.of()
    config, tensors = model.config, model.layer(layer, "ffn")
    router = Router(config, f"layers.{layer}.ffn.gate", config.is_hash(layer))
    x, tokens = model.random(T, config.hidden_size), np.arange(11, 11 + T)

    def emit(op, v):
        size = op.Shape(v["x"], start=0, end=1)
        found = router(op, v["x"], SimpleNamespace(tokens=v["tokens"], num_tokens=size))
        return [found.scores, op.Cast(found.columns, to=1), found.weights]

    feeds = {"x": x, "tokens": tokens}
    scores, columns, weights = run_emitted(tmp_path, emit, feeds, model.tensors.__getitem__)
    chosen, shares = twin.route(
        config, tensors, x.astype(float), tokens, is_hash=config.is_hash(layer)
    )
    assert min(choice.gap for choice in chosen) > EXACT
    assert columns.astype(int).tolist() == [choice.ids.tolist() for choice in chosen]
    assert_near(weights * config.routed_scaling_factor, shares)
    plain = np.sqrt(np.logaddexp(0.0, tensors.linear(x.astype(float), "gate")))
    assert_near(scores, plain)


FORMS = [
    (Dialect.PORTABLE, WeightType.F32, Experts.CHOSEN, "GatheredExperts", EXACT),
    (Dialect.PORTABLE, WeightType.F16, Experts.CHOSEN, "GatheredExperts", EXACT),
    (Dialect.PORTABLE, WeightType.F32, Experts.ALL, "BatchedExperts", EXACT),
    (Dialect.PORTABLE, WeightType.BF16, Experts.ALL, "BatchedExperts", EXACT),
    (Dialect.ORT, WeightType.F32, Experts.CHOSEN, "FusedExperts", EXACT),
    (Dialect.ORT, WeightType.F16, Experts.CHOSEN, "FusedExperts", EXACT),
    (Dialect.ORT, WeightType.F32, Experts.ALL, "BatchedExperts", EXACT),
    (Dialect.PORTABLE, WeightType.INT8, Experts.CHOSEN, "GatheredInt8Experts", EXACT),
    (Dialect.PORTABLE, WeightType.INT8, Experts.ALL, "SeparateExperts", ROUNDED_INPUTS),
    (Dialect.PORTABLE, WeightType.INT4, Experts.CHOSEN, "SeparateExperts", ROUNDED_INPUTS),
    (Dialect.ORT, WeightType.INT8, Experts.CHOSEN, "FusedQuantExperts", ROUNDED_INPUTS),
    (Dialect.ORT, WeightType.INT4, Experts.CHOSEN, "FusedQuantExperts", ROUNDED_INPUTS),
]


@pytest.mark.parametrize(
    ("dialect", "weights", "which", "form", "bound"),
    FORMS,
    ids=lambda value: value.value if hasattr(value, "value") else str(value),
)
def test_expert_layer(
    tmp_path: Path,
    dialect: Dialect,
    weights: WeightType,
    which: Experts,
    form: str,
    bound: float,
) -> None:
    """Each class of experts, with clamps that bite; the twin gets the weights as stored."""
    model = Model.of(**{**BLOCKS, "swiglu_limit": 0.75})
    config, prefix = model.config, "layers.1.ffn.experts"
    options = ExportOptions(dialect=dialect, weights=weights, experts=which)
    layer = expert_layer(expert_sizes(config), ExpertNames(prefix), options)
    assert type(layer) is getattr(expert_forms, form)
    x = model.random(T, config.hidden_size)
    scores, columns, shares = a_routing(config)

    def emit(op, v):
        size = op.Shape(v["x"], start=0, end=1)
        routing = Routing(v["scores"], v["columns"], v["shares"], size, config.num_experts)
        return [layer(op, v["x"], routing)]

    feeds = {"x": x, "scores": scores, "columns": columns, "shares": shares}
    (ours,) = run_emitted(tmp_path, emit, feeds, model.tensors.__getitem__)
    stored = twin.Tensors(
        {n: as_stored(t, weights) for n, t in model.tensors.items() if n.startswith(prefix)}
    )
    wanted = np.zeros((T, config.hidden_size))
    for token, place in np.ndindex(columns.shape):
        one = stored.under(f"{prefix}.{columns[token, place]}")
        wanted[token] += shares[token, place] * twin.swiglu(
            config, one, x[token].astype(float)
        )
    assert_near(ours, wanted, bound)


def a_routing(config: DeepseekV4Config) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Scores [T, E], distinct experts [T, K] that are not simply the best, their shares [T, K]."""
    rng = np.random.default_rng(4)
    scores = rng.uniform(0.2, 2, size=(T, config.num_experts)).astype(FLOATS)
    order = rng.random(scores.shape).argsort(axis=1)
    columns = order[:, : config.experts_per_token].astype(np.int64)
    picked = np.take_along_axis(scores, columns, axis=1)
    return scores, columns, picked / picked.sum(axis=1, keepdims=True)


def as_stored(matrix: NDArray[Any], weights: WeightType, block: int = 32) -> NDArray[Any]:
    """What a matrix becomes when it is stored in a weight form."""
    if weights.bits is not None:
        return dequantise(quantise(matrix, weights.bits, block), block)
    dtypes = {WeightType.F16: np.float16, WeightType.BF16: ml_dtypes.bfloat16}
    return matrix.astype(dtypes.get(weights, FLOATS)).astype(FLOATS)


WEIGHTS = [
    (Dialect.PORTABLE, WeightType.F32, EXACT),
    (Dialect.PORTABLE, WeightType.F16, EXACT),
    (Dialect.PORTABLE, WeightType.BF16, EXACT),
    (Dialect.PORTABLE, WeightType.INT8, ROUNDED_INPUTS),
    (Dialect.PORTABLE, WeightType.INT4, ROUNDED_INPUTS),
    (Dialect.ORT, WeightType.INT8, ROUNDED_INPUTS),
    (Dialect.ORT, WeightType.INT4, ROUNDED_INPUTS),
]


@pytest.mark.parametrize(("dialect", "weights", "bound"), WEIGHTS)
def test_linear(tmp_path: Path, dialect: Dialect, weights: WeightType, bound: float) -> None:
    """Two matrices joined along their outputs, in every weight form."""
    model = Model.of(**BLOCKS)
    names = ["layers.0.attn.wq_a.weight", "layers.0.attn.wkv.weight"]
    layer = linear(names, 96, 160 + 112, ExportOptions(dialect=dialect, weights=weights))
    x = model.random(T, 96)
    (ours,) = run_emitted(
        tmp_path, lambda op, v: [layer(op, v["x"])], {"x": x}, model.tensors.__getitem__
    )
    stored = np.concatenate([as_stored(model.tensors[name], weights) for name in names])
    assert_near(ours, x.astype(float) @ stored.T.astype(float), bound)


@pytest.mark.parametrize(("dialect", "weights", "bound"), WEIGHTS)
def test_grouped_output(
    tmp_path: Path, dialect: Dialect, weights: WeightType, bound: float
) -> None:
    model = Model.of(**BLOCKS)
    config = model.config
    options = ExportOptions(dialect=dialect, weights=weights)
    layer = GroupedOutput(config, "layers.0.attn", options)
    mixed = model.random(T, config.num_heads, config.head_dim)
    (ours,) = run_emitted(
        tmp_path, lambda op, v: [layer(op, v["x"])], {"x": mixed}, model.tensors.__getitem__
    )
    groups, rank = config.o_groups, config.o_lora_rank
    wide = as_stored(model.tensors["layers.0.attn.wo_a.weight"], weights).astype(float)
    parts = mixed.reshape(T, groups, -1).astype(float)
    blocks = wide.reshape(groups, rank, -1)
    narrow = [parts[:, g] @ blocks[g].T for g in range(groups)]
    last = as_stored(model.tensors["layers.0.attn.wo_b.weight"], weights).astype(float)
    assert_near(ours, np.concatenate(narrow, axis=1) @ last.T, 2 * bound)


def test_shared_expert(tmp_path: Path) -> None:
    model = Model.of("hca_only")  # its clamp bites
    layer = SharedExpert(model.config, "layers.0.ffn.shared_experts", ExportOptions())
    x = model.random(T, model.config.hidden_size) * FLOATS(3)
    (ours,) = run_emitted(
        tmp_path, lambda op, v: [layer(op, v["x"])], {"x": x}, model.tensors.__getitem__
    )
    tensors = model.layer(0, "ffn").under("shared_experts")
    assert_near(ours, twin.swiglu(model.config, tensors, x.astype(float)))


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("layer", [0, 1], ids=["hash", "scores"])
def test_feed_forward(tmp_path: Path, dialect: Dialect, layer: int) -> None:
    """Router, routed experts, their factor and the shared expert together."""
    model = Model.of()
    config = model.config
    options = ExportOptions(dialect=dialect)
    ffn = FeedForward(config, layer, f"layers.{layer}.ffn", options)
    x, tokens = model.random(T, config.hidden_size), np.arange(50, 50 + T)

    def emit(op, v):
        size = op.Shape(v["x"], start=0, end=1)
        return [ffn(op, v["x"], SimpleNamespace(tokens=v["tokens"], num_tokens=size))]

    feeds = {"x": x, "tokens": tokens}
    (ours,) = run_emitted(tmp_path, emit, feeds, model.tensors.__getitem__)
    tensors, wide = model.layer(layer, "ffn"), x.astype(float)
    is_hash = config.is_hash(layer)
    chosen, shares = twin.route(config, tensors, wide, tokens, is_hash=is_hash)
    ids = np.stack([choice.ids for choice in chosen])
    assert_near(ours, twin.mix_experts(config, tensors, wide, ids, shares))
