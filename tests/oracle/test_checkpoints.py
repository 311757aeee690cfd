"""Checkpoints, configs, frequencies and storage forms against transformers and torch."""

from __future__ import annotations

from copy import deepcopy  # transformers writes into the dicts it is given
from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from cachegraph.graphgen.weights.dequant import decode_scales, dequantize_fp8
from cachegraph.graphgen.weights.reader import open_checkpoint
from cachegraph.models.deepseek_v4.checkpoint import checkpoint_table
from cachegraph.models.deepseek_v4.parse import load_config, parse_config
from cachegraph.models.deepseek_v4.presets import PRESETS
from cachegraph.models.deepseek_v4.rope import inverse_frequencies

pytestmark = pytest.mark.r3


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_random_checkpoints_load_without_a_word_and_come_back(tmp_path: Path, name):
    """transformers finds every tensor, and we read what it saves to the same model."""
    folder = tiny.random_checkpoint(tmp_path / "ours", seed=3, name=name)
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert {key: found for key, found in info.items() if found} == {}
    with torch.inference_mode():
        tokens = torch.arange(2, 60)[None]
        logits = model(tokens, use_cache=False).logits
    assert 1 < logits.abs().max() < 10
    model.save_pretrained(tmp_path / "theirs")
    config, saved = load_config(folder), load_config(tmp_path / "theirs")
    assert saved == config
    checkpoint = open_checkpoint(tmp_path / "theirs", checkpoint_table(saved))
    for wanted_name, wanted in tiny.random_tensors(config, 3).items():
        np.testing.assert_array_equal(checkpoint.read(wanted_name), wanted, wanted_name)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_mean_the_same_to_transformers(tmp_path: Path, name):
    DeepseekV4Config.from_dict(deepcopy(PRESETS[name])).save_pretrained(tmp_path)
    assert load_config(tmp_path) == parse_config(PRESETS[name])


@pytest.mark.parametrize(
    ("head_dim", "dims", "yarn"),
    [
        (512, 64, {"factor": 16, "original_max_position_embeddings": 65536}),
        (24, 10, {"factor": 4, "original_max_position_embeddings": 48, "beta_fast": 8}),
        (20, 6, {"factor": 2.5, "original_max_position_embeddings": 16}),
        (48, 12, None),
    ],
)
def test_frequencies(head_dim, dims, yarn):
    raw = {
        **deepcopy(PRESETS["deepseek-v4-flash"]),
        "head_dim": head_dim,
        "qk_rope_head_dim": dims,
        "rope_scaling": yarn and {"type": "yarn", **yarn},
    }
    config = parse_config(raw)
    theirs = DeepseekV4RotaryEmbedding(DeepseekV4Config.from_dict(deepcopy(raw)))
    for rope, wanted in (
        (config.rope_main, theirs.main_inv_freq),
        (config.rope_compress, theirs.compress_inv_freq),
    ):
        np.testing.assert_allclose(inverse_frequencies(rope, dims), wanted, rtol=5e-7)
    assert theirs.compress_attention_scaling == 1.0


def test_fp8_as_torch_reads_it():
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (300, 200), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    bytes_ = rng.integers(0, 255, (3, 2), np.uint8) // 2 + 60
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    scales = torch.from_numpy(bytes_).view(torch.float8_e8m0fnu).float()
    spread = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    ours = decode_scales("scale", bytes_.ravel(), "F8_E8M0").reshape(3, 2)
    np.testing.assert_array_equal(ours, scales.numpy())
    out = dequantize_fp8(codes.ravel(), ours, 200)
    np.testing.assert_array_equal(out, (values * spread).numpy())
