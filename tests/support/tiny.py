"""Random tiny DeepSeek-V4 checkpoints in float32, written without torch.

Owns their sizes (`CONFIGS`); the numbers are those of `cachegraph.tools.random_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind, Rope
from cachegraph.models.deepseek_v4.parse import load_config
from cachegraph.tools.random_checkpoint import generate_tensors, write_checkpoint

W, C, H = LayerKind.WINDOW, LayerKind.CSA, LayerKind.HCA
_YARN = {"factor": 4.0, "original_context": 48, "beta_fast": 8.0, "beta_slow": 1.0}

# Sizes are pairwise different within a config and are no powers of two, where the model allows it.
CONFIGS: Mapping[str, Mapping[str, object]] = {
    # every kind of layer, one hash layer
    "mixed": {},
    # no CSA, so no indexer; YaRN; no hash layer; clamps that bite; compressed layer first
    "hca_only": {
        "layer_kinds": (H, W, H),
        "num_hash_layers": 0,
        "vocab_size": 109,
        "hidden_size": 56,
        "num_heads": 10,
        "head_dim": 28,
        "rope_head_dim": 12,
        "q_lora_rank": 36,
        "o_groups": 5,
        "o_lora_rank": 14,
        "sliding_window": 5,
        "hca_ratio": 8,
        "index_topk": 7,
        "num_experts": 9,
        "experts_per_token": 2,
        "expert_size": 26,
        "swiglu_limit": 0.75,
        "routed_scaling_factor": 2.5,
        "rope_compress": Rope(theta=160000.0, **_YARN),
    },
    # no HCA; two hash layers, one of them CSA; three streams
    "csa_only": {
        "layer_kinds": (C, W, C, C),
        "num_hash_layers": 2,
        "vocab_size": 167,
        "hidden_size": 72,
        "num_heads": 9,
        "head_dim": 22,
        "rope_head_dim": 10,
        "q_lora_rank": 28,
        "o_groups": 3,
        "o_lora_rank": 13,
        "sliding_window": 11,
        "index_heads": 19,
        "index_head_dim": 12,
        "index_topk": 3,
        "num_experts": 5,
        "experts_per_token": 3,
        "expert_size": 34,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 7,
        "rms_norm_eps": 1e-5,
        "rope_compress": Rope(theta=40000.0),
    },
    # no compressed cache at all
    "window_only": {
        "layer_kinds": (W, W, W),
        "num_hash_layers": 1,
        "vocab_size": 83,
        "hidden_size": 44,
        "num_heads": 7,
        "head_dim": 24,
        "rope_head_dim": 14,
        "q_lora_rank": 30,
        "o_groups": 7,
        "o_lora_rank": 10,
        "sliding_window": 6,
        "num_experts": 6,
        "experts_per_token": 5,
        "expert_size": 20,
        "rope_main": Rope(theta=5000.0),
    },
    # other ratios, several layers of each kind, YaRN
    "ratios": {
        "layer_kinds": (H, C, C, W, H, C),
        "num_hash_layers": 2,
        "vocab_size": 149,
        "hidden_size": 60,
        "num_heads": 12,
        "head_dim": 26,
        "rope_head_dim": 10,
        "q_lora_rank": 42,
        "o_groups": 6,
        "o_lora_rank": 11,
        "sliding_window": 9,
        "csa_ratio": 6,
        "hca_ratio": 20,
        "index_heads": 17,
        "index_head_dim": 18,
        "index_topk": 4,
        "num_experts": 7,
        "experts_per_token": 3,
        "expert_size": 23,
        "hc_sinkhorn_iters": 3,
        "rope_compress": Rope(theta=160000.0, **_YARN),
    },
    # the published ratios and the published form of config.json
    "published": {
        "layer_kinds": (W, W, C, H, C),
        "num_hash_layers": 1,
        "vocab_size": 139,
        "hidden_size": 50,
        "num_heads": 6,
        "head_dim": 38,
        "rope_head_dim": 18,
        "q_lora_rank": 34,
        "o_groups": 2,
        "o_lora_rank": 15,
        "sliding_window": 10,
        "hca_ratio": 128,
        "index_heads": 21,
        "index_head_dim": 22,
        "index_topk": 6,
        "num_experts": 7,
        "experts_per_token": 3,
        "expert_size": 19,
        "rope_compress": Rope(theta=160000.0, **_YARN),
    },
}

_DEFAULTS: Mapping[str, object] = {
    "layer_kinds": (W, C, H, C, H),
    "num_hash_layers": 1,
    "vocab_size": 131,
    "hidden_size": 40,
    "num_heads": 6,
    "head_dim": 20,
    "rope_head_dim": 6,
    "q_lora_rank": 24,
    "o_groups": 3,
    "o_lora_rank": 10,
    "sliding_window": 7,
    "csa_ratio": 4,
    "hca_ratio": 12,
    "index_heads": 18,
    "index_head_dim": 14,
    "index_topk": 5,
    "num_experts": 7,
    "experts_per_token": 3,
    "expert_size": 22,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_main": Rope(theta=10000.0),
    "rope_compress": Rope(theta=160000.0),
    "max_position": 4096,
    "bos_token_id": 0,
    "eos_token_ids": (1,),
}


def tiny_config(name: str = "mixed", **sizes: object) -> DeepseekV4Config:
    """A named tiny config, with any field of DeepseekV4Config replaced."""
    values = {**_DEFAULTS, **CONFIGS[name], **sizes}
    values.setdefault("shared_expert_size", values["expert_size"])
    return DeepseekV4Config(**values)  # type: ignore[arg-type]


def random_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    name: str = "mixed",
    with_draft: bool = False,
    **sizes: object,
) -> Path:
    """Write config.json and model.safetensors (float32, published names) and return the folder.

    Sizes are those of the named config, with any field of DeepseekV4Config replaced. with_draft:
    an MTP block too; config.json does not speak of it.
    """
    config = tiny_config(name, **sizes)
    write_checkpoint(folder, config, seed=seed, dtype="F32", with_draft=with_draft)
    assert load_config(folder) == config, "config.json does not say what was asked for"
    return folder


def random_tensors(
    config: DeepseekV4Config, seed: int, *, with_draft: bool = False
) -> dict[str, np.ndarray]:
    """Every tensor of the table by name; the same for the same config and seed."""
    rows = generate_tensors(config, seed, with_draft=with_draft)
    return {spec.name: values for spec, values in rows}
