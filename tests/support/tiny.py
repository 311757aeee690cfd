"""Random tiny DeepSeek-V4 checkpoints in float32, written without torch.

Owns their sizes (`CONFIGS`) and the scale of their numbers: logits of order 1, no constant
parameter anywhere, enough index heads that exact score ties do not happen. Loads in
transformers 5.24.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind, Rope
from cachegraph.models.deepseek_v4.parse import load_config
from cachegraph.models.deepseek_v4.tensors import TensorKind, TensorSpec, tensor_table

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
    folder: Path, *, seed: int = 0, name: str = "mixed", **sizes: object
) -> Path:
    """Write config.json and model.safetensors (float32, published names) and return the folder.

    Sizes are those of the named config, with any field of DeepseekV4Config replaced.
    """
    config = tiny_config(name, **sizes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(config), indent=1))
    save_file(random_tensors(config, seed), folder / "model.safetensors", {"format": "pt"})
    assert load_config(folder) == config, "config.json does not say what was asked for"
    return folder


def random_tensors(config: DeepseekV4Config, seed: int) -> dict[str, np.ndarray]:
    """Every tensor of the table by name; the same for the same config and seed."""
    rng = np.random.default_rng(seed)
    return {spec.name: _values(rng, spec, config) for spec in tensor_table(config)}


def _values(
    rng: np.random.Generator, spec: TensorSpec, config: DeepseekV4Config
) -> np.ndarray:
    if spec.kind is TensorKind.TABLE:  # distinct experts for each token
        order = rng.random((spec.shape[0], config.num_experts)).argsort(axis=1)
        return np.ascontiguousarray(order[:, : spec.shape[1]], dtype=np.int64)
    noise = rng.standard_normal(spec.shape).astype(np.float32)
    leaf = spec.name.rsplit(".", 1)[-1]
    if spec.name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if leaf.endswith("_scale"):
        return 0.7 + 0.2 * noise
    if leaf in ("bias", "ape", "attn_sink") or leaf.endswith("_base"):
        return 0.5 * noise
    return noise if spec.name == "embed.weight" else noise / np.float32(spec.shape[-1] ** 0.5)


def config_json(config: DeepseekV4Config) -> dict[str, object]:
    """config.json of a config: in published form where the ratios are 4 and 128, else in the form
    that transformers writes (which alone can say other ratios)."""
    is_published = (config.csa_ratio, config.hca_ratio) == (4, 128)
    form = _published(config) if is_published else _transformers(config)
    renamed = {
        "num_heads": "num_attention_heads",
        "index_heads": "index_n_heads",
        "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_size": "moe_intermediate_size",
        "max_position": "max_position_embeddings",
        "rope_head_dim": "qk_rope_head_dim",
        "num_nextn_layers": "num_nextn_predict_layers",
    }
    own = {"layer_kinds", "num_hash_layers", "csa_ratio", "hca_ratio", "rope_main"}
    own |= {"rope_compress", "shared_expert_size", "eos_token_ids"}
    plain = {
        renamed.get(field.name, field.name): getattr(config, field.name)
        for field in fields(config)
        if field.name not in own
    }
    fixed = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": config.eos_token_ids[0],
    }
    return {**fixed, **plain, **form}


def _published(config: DeepseekV4Config) -> dict[str, object]:
    rope = config.rope_compress
    scaling = {"type": "yarn", **_yarn(rope)} if rope.factor != 1.0 else None
    return {
        "compress_ratios": [config.ratio(kind) for kind in config.layer_kinds],
        "num_hash_layers": config.num_hash_layers,
        "rope_theta": config.rope_main.theta,
        "compress_rope_theta": rope.theta,
        "rope_scaling": scaling,
    }


def _transformers(config: DeepseekV4Config) -> dict[str, object]:
    types = {W: "sliding_attention", C: "compressed_sparse_attention"}
    types[H] = "heavily_compressed_attention"
    hashed = config.num_hash_layers
    factor = config.rope_head_dim / config.head_dim
    ropes = {}
    for name, rope in (("main", config.rope_main), ("compress", config.rope_compress)):
        ropes[name] = {"rope_theta": rope.theta, "partial_rotary_factor": factor}
        is_yarn = rope.factor != 1.0
        ropes[name] |= {"rope_type": "yarn" if is_yarn else "default"}
        ropes[name] |= {**_yarn(rope), "attention_factor": 1.0} if is_yarn else {}
    return {
        "layer_types": [types[kind] for kind in config.layer_kinds],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (config.num_layers - hashed),
        "compress_rates": {types[C]: config.csa_ratio, types[H]: config.hca_ratio},
        "partial_rotary_factor": factor,
        "rope_parameters": ropes,
    }


def _yarn(rope: Rope) -> dict[str, object]:
    return {
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_context,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
    }
