"""A whole Qwen4-Exp checkpoint: spellings, fused experts, own and shared scales, every fault."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import qwen4_exp as tiny
from support.raw_safetensors import Stored, plain, stored, write_file, write_sharded

from cachegraph.graphgen.weights.dequant import dequantize_fp8, fp8_grid
from cachegraph.graphgen.weights.files import SINGLE
from cachegraph.graphgen.weights.match import Form
from cachegraph.graphgen.weights.reader import open_checkpoint
from cachegraph.models.errors import CheckpointError
from cachegraph.models.qwen4_exp.parse import load_config
from cachegraph.models.qwen4_exp.tensors import (
    checkpoint_table,
    expert_name,
    ngram_shards,
    scale_name,
    tensor_table,
)
from cachegraph.models.tensor_specs import TensorKind

pytestmark = pytest.mark.r0

SMALL = tiny.tiny_config("six")
# Several FP8 blocks a side, the last ones cut short.
PACKED = tiny.tiny_config(hidden_size=300, expert_size=70, num_experts=3)
BUFFER = "layers.4.ple.ple_embedding.layer_multipliers"


def check(folder: Path, config, wanted) -> None:
    checkpoint = open_checkpoint(folder, checkpoint_table(config))
    assert [spec.name for spec in checkpoint.specs] == [x.name for x in tensor_table(config)]
    for spec in checkpoint.specs:
        read = checkpoint.read(spec.name)
        assert read.shape == spec.shape
        assert read.dtype == (np.int64 if spec.kind is TensorKind.TABLE else np.float32)
        np.testing.assert_array_equal(read, wanted[spec.name], spec.name)


def released(config, prefix="model.language_model.") -> dict[str, Stored]:
    """As the BF16 release spells it: experts fused, a vision tower and an MTP block beside."""
    values = tiny.random_tensors(config, 5)
    half = {
        name: array if array.dtype == np.int64 else array.astype(ml_dtypes.bfloat16)
        for name, array in values.items()
    }
    tensors = {
        name if name.startswith("lm_head") else prefix + name: plain(array)
        for name, array in half.items()
        if ".mlp.experts." not in name
    }
    for layer in range(config.num_layers):
        gate, up, down = (
            np.stack([half[expert_name(layer, e, which)] for e in range(config.num_experts)])
            for which in ("gate", "up", "down")
        )
        fused = f"{prefix}layers.{layer}.mlp.experts."
        tensors[f"{fused}gate_up_proj"] = plain(np.concatenate([gate, up], axis=1))
        tensors[f"{fused}down_proj"] = plain(down)
    tensors["model.visual.pos_embed.weight"] = plain(np.zeros((2, 2), np.float32))
    tensors["mtp.fc_hidden.weight"] = plain(np.zeros((2, 2), np.float32))
    return tensors


def rounded(config) -> dict[str, np.ndarray]:
    return {
        name: array
        if array.dtype == np.int64
        else array.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, array in tiny.random_tensors(config, 5).items()
    }


def packed(config) -> tuple[dict[str, Stored], dict[str, np.ndarray]]:
    """As the FP8 release: projections and experts in blocks, one scale for an n-gram table."""
    rng = np.random.default_rng(7)
    tensors: dict[str, Stored] = {}
    wanted: dict[str, np.ndarray] = {}
    values = tiny.random_tensors(config, 5)
    shared = np.array([0.0625], ml_dtypes.bfloat16)
    for spec in tensor_table(config):
        if spec.kind in (TensorKind.MATRIX, TensorKind.EXPERT):
            codes = rng.integers(0, 127, spec.shape, np.uint8)
            scale = rng.random(fp8_grid(*spec.shape), np.float32)
            wanted[spec.name] = dequantize_fp8(codes.ravel(), scale, spec.shape[1])
            tensors[scale_name(spec)] = plain(scale)
        elif spec.kind is TensorKind.NGRAM:
            codes = rng.integers(0, 127, spec.shape, np.uint8)
            floats = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            wanted[spec.name] = floats * np.float32(0.0625)
            tensors[scale_name(spec)] = plain(shared)
        else:
            wanted[spec.name] = values[spec.name]
            tensors[spec.name] = plain(values[spec.name])
            continue
        tensors[spec.name] = stored("F8_E4M3", codes)
    return tensors, wanted


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_random_tiny_checkpoints_match_their_config(tmp_path: Path, name):
    folder = tiny.random_checkpoint(tmp_path / "c", seed=5, name=name)
    check(folder, load_config(folder), tiny.random_tensors(tiny.tiny_config(name), 5))


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", ""])
def test_fused_experts_under_every_prefix(tmp_path: Path, prefix):
    write_sharded(tmp_path, released(SMALL, prefix), num_shards=3)
    check(tmp_path, SMALL, rounded(SMALL))


def test_fp8_with_own_and_shared_scales(tmp_path: Path):
    tensors, wanted = packed(PACKED)
    write_file(tmp_path / SINGLE, tensors)
    check(tmp_path, PACKED, wanted)
    checkpoint = open_checkpoint(tmp_path, checkpoint_table(PACKED))
    assert checkpoint.form("layers.0.linear_attn.in_proj_z.weight") is Form.FP8
    assert {checkpoint.form(name) for name in ngram_shards(PACKED, 1)} == {Form.FP8_SHARED}


def test_a_shared_scale_may_be_a_scalar(tmp_path: Path):
    tensors, wanted = packed(PACKED)
    shared = next(name for name in tensors if name.endswith("ngram_embedding.weight_scale"))
    tensors[shared] = plain(np.array(0.0625, np.float32))
    write_file(tmp_path / SINGLE, tensors)
    check(tmp_path, PACKED, wanted)


@pytest.mark.parametrize(
    ("leaf", "value", "fact"),
    [
        ("ngram_embedding.weight_scale", None, r"missing \(4\)"),
        ("ngram_embedding.weight_scale", plain(np.ones(2, np.float32)), r"wanted \[1\] as"),
        ("0.self_attn.q_norm.weight_scale", plain(np.ones(1, np.float32)), "unexpected"),
        ("shard_1.weight", plain(np.ones((108, 17), np.float32)), r"wanted \[108, 16\] as"),
    ],
)
def test_shared_scales_and_shards_are_checked(tmp_path: Path, leaf, value, fact):
    tensors, _ = packed(PACKED)
    name = next((each for each in tensors if each.endswith(leaf)), leaf)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    write_file(tmp_path / SINGLE, tensors)
    with pytest.raises(CheckpointError, match=fact):
        open_checkpoint(tmp_path, checkpoint_table(PACKED))


def test_a_shared_scale_of_float_shards_is_unexpected(tmp_path: Path):
    tensors = released(SMALL, "")
    tensors["layers.4.ple.ple_embedding.ngram_embedding.weight_scale"] = plain(
        np.ones(1, np.float32)
    )
    write_file(tmp_path / SINGLE, tensors)
    with pytest.raises(CheckpointError, match=r"unexpected \(1\)"):
        open_checkpoint(tmp_path, checkpoint_table(SMALL))


def test_another_hash_is_refused_when_opened(tmp_path: Path):
    """Rows of another hash are plausible nonsense, so the buffers must be the config's."""
    tensors = released(SMALL, "")
    multipliers = np.array(SMALL.ngram(0).multipliers)
    multipliers[2] += 2
    tensors[BUFFER] = plain(multipliers)
    write_file(tmp_path / SINGLE, tensors)
    with pytest.raises(CheckpointError, match=f"{BUFFER} holds .*, wanted .*one checkpoint"):
        open_checkpoint(tmp_path, checkpoint_table(SMALL))


def test_buffers_that_went_through_floats_are_refused(tmp_path: Path):
    tensors = released(SMALL, "")
    tensors[BUFFER] = plain(np.array(SMALL.ngram(0).multipliers, np.float32))
    write_file(tmp_path / SINGLE, tensors)
    with pytest.raises(CheckpointError, match=f"{BUFFER} is F32 .* as I64 or I32"):
        open_checkpoint(tmp_path, checkpoint_table(SMALL))


def test_faults_come_at_once_under_the_familys_name(tmp_path: Path):
    tensors = released(SMALL)
    del tensors["lm_head.weight"]
    tensors["model.language_model.norm.weight"] = plain(np.zeros(52, np.float32))
    tensors["model.language_model.layers.1.mlp.experts.down_proj"] = plain(
        np.zeros((7, 26, 52), np.float32)
    )
    write_file(tmp_path / SINGLE, tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path, checkpoint_table(SMALL))
    for fact in (
        "lm_head.weight [83, 52]",
        "unexpected (1):\n    model.language_model.norm.weight",
        "down_proj is F32 [7, 26, 52], wanted [7, 52, 26]",
    ):
        assert fact in str(caught.value), fact
