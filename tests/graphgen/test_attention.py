"""Attention of each layer kind over several planned steps, against the float64 twin.

Covers the window, both compressors with their carried state, the indexer's choice and the sinks,
with every lowering of reads, writes and selection; output and cache rows are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.emitted import World, open_emitted, run
from support.tiny import random_tensors, tiny_config

from cachegraph.graphgen.cache_ops import stored_caches
from cachegraph.graphgen.deepseek_v4.attention import Attention
from cachegraph.graphgen.deepseek_v4.step import emit_step
from cachegraph.models.buckets import Bucket
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind
from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind
from cachegraph.models.deepseek_v4.contract import contract, ladder, planner_specs
from cachegraph.models.deepseek_v4.twin import AttentionRun, run_attention
from cachegraph.models.export_options import ExportOptions, RowRead, RowWrite, Select
from cachegraph.models.twin_tools import Tensors

pytestmark = pytest.mark.r2

BOUND = 2e-5
LENGTH = 59  # of the sequences; the middle of a block of each ratio
# Tokens of both sequences in each step: a prefill, one token, an odd rest ...
STEPS = (17, 1, 1, 1, 1, 5, 16, 2, 15)
assert sum(STEPS) == LENGTH

LOWERINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "elements": {"gather": RowRead.ELEMENTS, "scatter": RowWrite.ELEMENTS},
    "nd": {"gather": RowRead.ND},
    "mask": {"select": Select.MASK},
    "mask_elements": {"select": Select.MASK, "gather": RowRead.ELEMENTS},
}


def tensors_of(config: DeepseekV4Config) -> dict[str, NDArray[Any]]:
    return random_tensors(config, seed=6)


def inputs(config: DeepseekV4Config) -> NDArray[np.float32]:
    """[2, LENGTH, D]: what the layer sees of two sequences."""
    rng = np.random.default_rng(11)
    return rng.standard_normal((2, LENGTH, config.hidden_size)).astype(np.float32)


def run_steps(
    folder: Path, world: World, config: DeepseekV4Config, options: ExportOptions
) -> dict[int, NDArray[np.float32]]:
    """The layer's outputs for both sequences after all steps; the caches are in `world`."""
    (kind,) = config.layer_kinds
    layer = Attention(config, kind, "layers.0.attn", options)
    specs = world.contract.caches

    def emit(op, v):
        caches = stored_caches(specs, v)
        out, written = layer(op, v["x"], emit_step(op, config, v), caches)
        return [out, *(written[spec.kind].part(spec.part) for spec in specs)]

    x, session = inputs(config), None
    outputs: dict[int, list[NDArray[np.float32]]] = {0: [], 2: []}
    for step, streams in schedule():
        plan = world.plan({seq: [3] * step for seq in streams})
        bucket = larger(world.bucket(plan), world.ladder.steps)
        seen = np.zeros((bucket.streams, bucket.step, config.hidden_size), np.float32)
        for row, seq in enumerate(streams):
            start = sum(len(part) for part in outputs[seq])
            seen[row, :step] = x[seq // 2, start : start + step]
        feeds = {**world.feeds(plan, bucket), "x": seen.reshape(-1, config.hidden_size)}
        session = session or open_emitted(folder, emit, feeds, tensors_of(config).__getitem__)
        out, *caches = run(session, feeds)
        for row, seq in enumerate(streams):
            outputs[seq].append(out.reshape(seen.shape)[row, :step])
        world.commit(plan, {s.name: rows for s, rows in zip(specs, caches, strict=True)})
    return {seq: np.concatenate(parts) for seq, parts in outputs.items()}


@pytest.mark.parametrize("kind", LayerKind)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_attention_over_steps(tmp_path: Path, kind: LayerKind, lowering: str) -> None:
    """Two sequences, one behind the other by the first step, in padded buckets."""
    config = tiny_config(layer_kinds=(kind,), num_hash_layers=0)
    capacity = Capacity(context=64, sequences=3, max_step=17)
    world = World(
        contract=contract(config, capacity),
        planners=planner_specs(config, capacity),
        ladder=ladder(config, capacity),
    )
    outputs = run_steps(tmp_path, world, config, ExportOptions(**LOWERINGS[lowering]))
    for seq, out in outputs.items():
        twin = twin_of(config, seq, len(out))
        assert twin.index_gap.min() > 1e-5, "draw other inputs"
        np.testing.assert_allclose(out, twin.out, rtol=0, atol=BOUND)
        for name, (ours, wanted) in cache_rows(config, world, seq, twin).items():
            np.testing.assert_allclose(ours, wanted, rtol=0, atol=BOUND, err_msg=name)


def twin_of(config: DeepseekV4Config, seq: int, length: int) -> AttentionRun:
    own = Tensors(tensors_of(config)).under("layers.0.attn")
    x = inputs(config)[seq // 2, :length].astype(float)
    return run_attention(config, own, config.layer_kinds[0], x)


def schedule() -> list[tuple[int, tuple[int, ...]]]:
    """(tokens, sequences) of each call: sequence 2 joins in the second, 0 is alone in the first."""
    return [(STEPS[0], (0,)), *((step, (0, 2)) for step in STEPS[1:])]


def larger(bucket: Bucket, steps: tuple[int, ...]) -> Bucket:
    """The next rung of tokens per stream, so that every call has padding."""
    higher = [rung for rung in steps if rung > bucket.step]
    step = higher[0] if higher else bucket.step
    return Bucket(
        streams=3, step=step, context=bucket.context, closes=bucket.closes, all_rows=True
    )


def cache_rows(
    config: DeepseekV4Config, world: World, seq: int, twin: AttentionRun
) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Our rows and the twin's, of every cache, by (sequence, position)."""
    length = len(twin.raw)
    pairs = {}
    for spec in world.contract.caches:
        base, size = spec.layout.base(seq), spec.layout.rows_per_stream
        rows = world.caches[spec.name]
        if spec.kind is CacheKind.RAW:
            positions = np.arange(length - config.sliding_window, length)
            wanted = twin.raw[positions]
        elif spec.kind in twin.compressors:
            wanted = twin.compressors[spec.kind].rows
            positions = np.arange(len(wanted))
        else:
            part = twin.compressors[CacheKind(spec.kind.value.removesuffix("_state"))]
            positions = np.arange(length - size, length)
            wanted = np.concatenate([part.state_kv, part.state_score], axis=1)[positions]
        pairs[spec.name] = (rows[base + positions % size], wanted)
    return pairs


def test_the_last_token_sees_what_each_kind_adds() -> None:
    """Else the test above proves less than it says."""
    for kind, least in ((LayerKind.CSA, 5), (LayerKind.HCA, 4)):
        config = tiny_config(layer_kinds=(kind,), num_hash_layers=0)
        twin = twin_of(config, 0, LENGTH)
        assert len(twin.blocks[-1]) == least
        assert kind is not LayerKind.CSA or np.isfinite(twin.index_gap[-1])
