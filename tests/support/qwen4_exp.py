"""Random tiny Qwen4-Exp checkpoints in float32, written without torch.

Owns their sizes (`CONFIGS`); the numbers are those of `cachegraph.tools.random_qwen4_exp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cachegraph.models.qwen4_exp.config import GateActivation, LayerKind, Qwen4ExpConfig
from cachegraph.models.qwen4_exp.parse import load_config
from cachegraph.tools.random_qwen4_exp import generate_tensors, write_checkpoint

G, Q = LayerKind.GDN, LayerKind.QSA

# But for "plain", sizes are pairwise different within a config and are no powers of two, where the
# model allows it.
CONFIGS: Mapping[str, Mapping[str, object]] = {
    # the shape of the release in small: one attention layer in four, an n-gram embedding in layer 1
    "plain": {},
    # two attention layers, the first layer of all one of them; SiLU gate; pools of 3; an n-gram
    # table whose parts are not equal; experts' weights not normalised; a head that rotates wholly
    "six": {
        "layer_kinds": (Q, G, G, Q, G, G),
        "vocab_size": 83,
        "hidden_size": 52,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 14,
        "rotary_dim": 14,
        "rope_theta": 5e4,
        "mrope_section": (3, 2, 2),
        "index_heads": 17,
        "index_head_dim": 22,
        "index_budget": 15,
        "index_ratio": 3,
        "linear_key_heads": 3,
        "linear_value_heads": 9,
        "linear_key_dim": 10,
        "linear_value_dim": 11,
        "linear_conv_kernel": 3,
        "output_gate": GateActivation.SILU,
        "num_experts": 7,
        "experts_per_token": 2,
        "expert_size": 26,
        "shared_expert_size": 19,
        "norm_topk_prob": False,
        "hc_count": 3,
        "hc_lowrank": 9,
        "ple_layers": (4,),
        "ple_embed_dim": 30,
        "ple_conv_kernel": 3,
        "ngram_size": 4,
        "ngram_heads": 1,
        "ngram_base": 53,
        "ngram_divisor": 10,
        "ngram_shards": 7,
        "ngram_end": 9,
        "bos_token_id": None,
        "eos_token_ids": (9, 3),
    },
    # two n-gram embeddings, one in the first layer; many indexer heads
    "ngrams": {
        "layer_kinds": (G, G, G, Q, G),
        "ple_layers": (0, 2),
        "vocab_size": 107,
        "hidden_size": 44,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 20,
        "rotary_dim": 10,
        "rope_theta": 1e6,
        "mrope_section": (3, 1, 1),
        "index_heads": 19,
        "index_head_dim": 12,
        "index_budget": 20,
        "index_ratio": 5,
        "linear_key_heads": 2,
        "linear_value_heads": 6,
        "linear_key_dim": 13,
        "linear_value_dim": 15,
        "num_experts": 11,
        "expert_size": 18,
        "shared_expert_size": 28,
        "hc_count": 5,
        "hc_lowrank": 7,
        "ple_embed_dim": 36,
        "ngram_heads": 3,
        "ngram_base": 61,
        "ngram_divisor": 14,
        "ngram_shards": 3,
        "ngram_seed": 77,
    },
}

_DEFAULTS: Mapping[str, object] = {
    "layer_kinds": (G, G, G, Q),
    "vocab_size": 97,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "rope_theta": 1e7,
    "mrope_section": (2, 1, 1),
    "index_heads": 4,
    "index_head_dim": 16,
    "index_budget": 16,
    "index_ratio": 4,
    "linear_key_heads": 2,
    "linear_value_heads": 4,
    "linear_key_dim": 16,
    "linear_value_dim": 16,
    "linear_conv_kernel": 4,
    "output_gate": GateActivation.SIGMOID,
    "num_experts": 8,
    "experts_per_token": 3,
    "expert_size": 24,
    "shared_expert_size": 24,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 8,
    "ple_layers": (1,),
    "ple_embed_dim": 64,
    "ple_conv_kernel": 4,
    "ngram_size": 3,
    "ngram_heads": 2,
    "ngram_base": 101,
    "ngram_divisor": 16,
    "ngram_shards": 4,
    "ngram_seed": 1234,
    "ngram_end": 5,
    "rms_norm_eps": 1e-6,
    "max_position": 4096,
    "bos_token_id": 5,
    "eos_token_ids": (5,),
}


def tiny_config(name: str = "plain", **sizes: object) -> Qwen4ExpConfig:
    """A named tiny config, with any field of Qwen4ExpConfig replaced."""
    return Qwen4ExpConfig(**{**_DEFAULTS, **CONFIGS[name], **sizes})  # type: ignore[arg-type]


def random_checkpoint(
    folder: Path, *, seed: int = 0, name: str = "plain", **sizes: object
) -> Path:
    """Write config.json and model.safetensors (float32, as transformers spells it).

    Sizes are those of the named config, with any field of Qwen4ExpConfig replaced.
    """
    config = tiny_config(name, **sizes)
    write_checkpoint(folder, config, seed=seed, dtype="F32")
    assert load_config(folder) == config, "config.json does not say what was asked for"
    return folder


def random_tensors(config: Qwen4ExpConfig, seed: int) -> dict[str, np.ndarray]:
    """Every tensor of the table by name; the same for the same config and seed."""
    return {spec.name: values for spec, values in generate_tensors(config, seed)}


def image_positions(before: int, height: int, width: int, after: int) -> np.ndarray:
    """Positions [T, 3] as (t, y, x): text, one image, text.

    All tokens of the image have one t; the text goes on behind the largest position.
    """
    text = np.arange(before)
    rows, columns = np.divmod(np.arange(height * width), width)
    image = np.stack(
        [np.full(height * width, before), before + rows, before + columns], axis=1
    )
    rest = before + max(height, width) + np.arange(after)
    return np.concatenate([np.stack([text] * 3, axis=1), image, np.stack([rest] * 3, axis=1)])
