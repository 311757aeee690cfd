"""The numpy twin against transformers: trained and random checkpoints, logits and cache rows.

Compared in float64, where only an error in an equation can show, and once in float32 to see what
the framework's own rounding costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.oracle import (
    oracle_caches64,
    oracle_greedy,
    oracle_logits,
    oracle_logits64,
    published_weights,
)
from support.tiny import CONFIGS, random_checkpoint

from cachegraph.models.contract import CacheKind
from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind
from cachegraph.models.deepseek_v4.parse import load_config
from cachegraph.models.deepseek_v4.twin import TwinRun, forward
from cachegraph.models.shipped import resolve

pytestmark = pytest.mark.r3

TRAINED = "trained"
# Below this a float32 run may choose otherwise than a float64 one; such a text is not used.
CLIFF = 1e-5
# Names of compressors in the framework's caches.
HELD_AS = {CacheKind.CSA: "compressor", CacheKind.HCA: "compressor", CacheKind.LID: "indexer"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A checkpoint, a text for it, and what the twin says."""

    folder: Path
    config: DeepseekV4Config
    tokens: Sequence[int]
    run: TwinRun


def long_enough(config: DeepseekV4Config) -> int:
    """Past two HCA blocks, the window and top-k blocks, and in the middle of a block of each."""
    cut = config.csa_ratio * (config.index_topk + 2)
    return max(2 * config.hca_ratio, config.sliding_window, cut) + config.csa_ratio - 1


def draw_case(folder: Path) -> Case:
    """The first seeded text whose narrowest cut is no cliff."""
    config, weights = load_config(folder), published_weights(folder)
    for seed in range(20):
        draw = np.random.default_rng(seed)
        tokens = draw.integers(config.vocab_size, size=long_enough(config)).tolist()
        run = forward(config, weights, tokens)
        if run.smallest_gap >= CLIFF:
            return Case(folder=folder, config=config, tokens=tokens, run=run)
    pytest.fail(f"no seed gives {folder.name} a text without a near tie")


@pytest.fixture(scope="module", params=[TRAINED, *CONFIGS])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The trained model, then each random config."""
    if request.param == TRAINED:
        return draw_case(resolve("tiny:deepseek_v4"))
    folder = tmp_path_factory.mktemp(request.param)
    random_checkpoint(folder, seed=1, name=request.param)
    return draw_case(folder)


def test_logits_are_equal_in_float64(case: Case) -> None:
    """Every equation of every layer kind agrees to rounding."""
    wanted = oracle_logits64(case.folder, case.tokens)
    np.testing.assert_allclose(case.run.logits, wanted, rtol=0, atol=1e-9)


def test_logits_are_within_1e_4_of_float32(case: Case) -> None:
    """What a float32 graph is allowed, the framework itself needs about half of."""
    wanted = oracle_logits(case.folder, case.tokens)
    np.testing.assert_allclose(case.run.logits, wanted, rtol=0, atol=1e-4)


def test_cache_rows_are_equal_in_float64(case: Case) -> None:
    """Raw and compressed rows, and the unfinished block's kv and score, of every layer."""
    held = oracle_caches64(case.folder, case.tokens)
    for layer, (run, rows) in enumerate(zip(case.run.layers, held, strict=True)):
        kept = len(rows["raw"])
        close = {"raw": (run.attention.raw[-kept:], rows["raw"])}
        for kind, compressor in run.attention.compressors.items():
            ratio = case.config.ratio(run.kind)
            name, left = HELD_AS[kind], len(case.tokens) % ratio
            start = len(case.tokens) - left
            bias = compressor_bias(case.folder, layer, kind)[:left]
            close |= {
                f"{kind} rows": (compressor.rows, rows[name]),
                f"{kind} kv": (compressor.state_kv[start:], rows[f"{name}_kv"]),
                f"{kind} score": (compressor.state_score[start:] - bias, rows[f"{name}_gate"]),
            }
        for what, (ours, theirs) in close.items():
            message = f"layer {layer} {what}"
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9, err_msg=message)


def compressor_bias(folder: Path, layer: int, kind: CacheKind) -> np.ndarray:
    """The position bias, which the framework adds to scores later than a state ring does."""
    below = "indexer.compressor" if kind is CacheKind.LID else "compressor"
    return published_weights(folder)[f"layers.{layer}.attn.{below}.ape"]


def test_the_text_reaches_every_cut(case: Case) -> None:
    """Else the tests above prove less than they say: blocks finish, queries see fewer than all."""
    for run in case.run.layers:
        blocks = run.attention.blocks[-1]
        if run.kind is LayerKind.HCA:
            assert len(blocks) >= 2
        if run.kind is LayerKind.CSA:
            visible = len(case.tokens) // case.config.csa_ratio
            assert len(blocks) == case.config.index_topk < visible
            assert np.isfinite(run.attention.index_gap[-1])
    assert np.isfinite(case.run.smallest_gap)


def test_a_prefix_gives_the_same_rows(case: Case) -> None:
    """No token sees a later one."""
    length = len(case.tokens) * 2 // 3
    short = forward(case.config, published_weights(case.folder), case.tokens[:length])
    np.testing.assert_allclose(short.logits, case.run.logits[:length], rtol=0, atol=1e-9)


def test_greedy_text_of_the_oracle_is_the_twins_too() -> None:
    """Up to the first close call, which must not come early."""
    folder = resolve("tiny:deepseek_v4")
    prompt = [17, 301, 44, 9, 512]
    greedy = oracle_greedy(folder, prompt, 80)
    assert greedy.is_whole or len(greedy.tokens) > 64
    text = [*prompt, *greedy.tokens]
    run = forward(load_config(folder), published_weights(folder), text)
    best = run.logits.argmax(axis=1)[len(prompt) - 1 : -1]
    assert best.tolist() == list(greedy.tokens)
