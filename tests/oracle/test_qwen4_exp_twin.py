"""The Qwen4-Exp twin against transformers: random checkpoints, logits, cache rows and states.

Compared in float64, where only an error in an equation can show, and once in float32 to see what
the framework's own rounding costs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from support.oracle import (
    Positions,
    oracle_logits,
    oracle_logits64,
    oracle_states64,
    published_weights,
)
from support.qwen4_exp import CONFIGS, image_positions, random_checkpoint, random_tensors
from transformers import Qwen4ExpForCausalLM

from cachegraph.graphgen.weights.reader import open_checkpoint
from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig
from cachegraph.models.qwen4_exp.parse import load_config
from cachegraph.models.qwen4_exp.tensors import checkpoint_table
from cachegraph.models.qwen4_exp.twin import AttentionRun, DeltaRun, TwinRun, forward

pytestmark = pytest.mark.r3

# Below this a float32 run may choose otherwise than a float64 one; such a text is not used.
CLIFF = 1e-5
LENGTH = 70
IMAGE = image_positions(before=11, height=3, width=4, after=LENGTH - 23)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A checkpoint, a text for it, where its tokens stand, and what the twin says."""

    folder: Path
    config: Qwen4ExpConfig
    tokens: Sequence[int]
    positions: Positions | None
    run: TwinRun


def draw_case(folder: Path, positions: Positions | None) -> Case:
    """The first seeded text, with ends inside, whose narrowest cut is no cliff."""
    config, weights = load_config(folder), published_weights(folder)
    for seed in range(20):
        tokens = np.random.default_rng(seed).integers(config.vocab_size, size=LENGTH)
        tokens[[13, 27, 28]] = config.ngram_end
        run = forward(config, weights, tokens, positions)
        if run.smallest_gap >= CLIFF:
            return Case(
                folder=folder,
                config=config,
                tokens=tokens.tolist(),
                positions=positions,
                run=run,
            )
    pytest.fail(f"no seed gives {folder.name} a text without a near tie")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: random_checkpoint(tmp_path_factory.mktemp(name), seed=1, name=name)
        for name in CONFIGS
    }


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture(scope="module", params=["text", "image"])
def case(request: pytest.FixtureRequest, folder: Path) -> Case:
    return draw_case(folder, IMAGE if request.param == "image" else None)


def test_logits_are_equal_in_float64(case: Case) -> None:
    """Every equation of every part agrees to rounding."""
    wanted = oracle_logits64(case.folder, case.tokens, case.positions)
    np.testing.assert_allclose(case.run.logits, wanted, rtol=0, atol=1e-9)


def test_logits_are_within_1e_5_of_float32(case: Case) -> None:
    """A float32 graph is allowed ten times as much."""
    wanted = oracle_logits(case.folder, case.tokens, case.positions)
    np.testing.assert_allclose(case.run.logits, wanted, rtol=0, atol=1e-5)


def test_states_are_equal_in_float64(case: Case) -> None:
    """Keys, values and indexer keys of every token; histories and matrices after the last."""
    held = oracle_states64(case.folder, case.tokens, case.positions)
    config, length = case.config, len(case.tokens)
    for layer, (run, rows) in enumerate(zip(case.run.layers, held, strict=True)):
        if isinstance(run.mixer, AttentionRun):
            close = {
                "keys": (run.mixer.keys, rows["keys"].swapaxes(0, 1)),
                "values": (run.mixer.values, rows["values"].swapaxes(0, 1)),
                "index": (run.mixer.index_keys, rows["index"]),
            }
        else:
            history = run.mixer.history(config, length)
            # The framework keeps one token more than its convolution reads.
            close = {
                "conv": (history, rows["conv"].T[-config.conv_history :]),
                "recurrent": (run.mixer.states[-1], rows["recurrent"]),
            }
        if run.ngram is not None:
            close["ngram"] = (run.ngram.history(config, length), rows["ngram_conv"].T)
        for what, (ours, theirs) in close.items():
            message = f"layer {layer} {what}"
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9, err_msg=message)


def test_the_text_reaches_every_cut(case: Case) -> None:
    """Else the tests above prove less than they say."""
    config = case.config
    mixers = [run.mixer for run in case.run.layers]
    for mixer in mixers:
        if isinstance(mixer, AttentionRun):
            assert len(mixer.pools[-1]) == config.top_pools < len(mixer.pooled)
            assert np.isfinite(mixer.index_gap[-1])
            # A token that completes a pool is not always among those it sees.
            assert any(token not in seen for token, seen in enumerate(mixer.tokens))
    assert any(isinstance(mixer, DeltaRun) for mixer in mixers)
    assert np.isfinite(case.run.smallest_gap)


def test_a_prefix_gives_the_same_rows(case: Case) -> None:
    """No token sees a later one."""
    length = LENGTH * 2 // 3
    positions = None if case.positions is None else case.positions[:length]
    weights = published_weights(case.folder)
    short = forward(case.config, weights, case.tokens[:length], positions)
    np.testing.assert_allclose(short.logits, case.run.logits[:length], rtol=0, atol=1e-9)


def test_an_end_changes_the_ngrams_of_the_tokens_behind_it(folder: Path) -> None:
    """As many as an n-gram is long, itself among them."""
    case = draw_case(folder, None)
    tokens = list(case.tokens)
    tokens[13] = (case.config.ngram_end + 1) % case.config.vocab_size
    other = forward(case.config, published_weights(folder), tokens)
    for ours, theirs in zip(case.run.layers, other.layers, strict=True):
        if ours.ngram is not None and theirs.ngram is not None:
            changed = np.flatnonzero((ours.ngram.ids != theirs.ngram.ids).any(axis=1))
            assert changed.tolist() == list(range(13, 13 + case.config.ngram_size))


def test_the_framework_finds_every_tensor_and_saves_the_same(
    folder: Path, tmp_path: Path
) -> None:
    """Names, shapes, shards and config.json, both ways."""
    model, report = Qwen4ExpForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    model.save_pretrained(tmp_path)
    assert names_of(tmp_path) == names_of(folder)
    config = load_config(tmp_path)
    assert config == load_config(folder)
    saved = open_checkpoint(tmp_path, checkpoint_table(config))
    for name, values in random_tensors(config, seed=1).items():
        np.testing.assert_array_equal(saved.read(name), values, name)
    assert json.loads((tmp_path / "config.json").read_text())["transformers_version"]


def names_of(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "np") as file:
        return set(file.keys())
