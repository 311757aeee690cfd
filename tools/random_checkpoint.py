"""Random DeepSeek-V4 checkpoints: for benchmarks and tests, at any size, without torch.

Owns the scale of the numbers: logits of order 1, no constant parameter anywhere, so that exact
score ties do not happen. Loads in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind, Rope
from cachegraph.models.deepseek_v4.draft_tensors import draft_table
from cachegraph.models.deepseek_v4.tensors import tensor_table
from cachegraph.models.tensor_specs import TensorKind, TensorSpec
from cachegraph.tools.random_files import write_tensors


def write_checkpoint(
    folder: Path, config: DeepseekV4Config, *, seed: int, dtype: str, with_draft: bool = False
) -> Path:
    """Write config.json and model.safetensors (published names), one tensor at a time.

    dtype: as in `write_tensors`. with_draft: an MTP block behind the main model, whose numbers stay
    the same.
    """
    tensors = generate_tensors(config, seed, with_draft=with_draft)
    return write_tensors(
        folder, config_json(config), _table(config, with_draft), tensors, dtype
    )


def generate_tensors(
    config: DeepseekV4Config, seed: int, *, with_draft: bool = False
) -> Iterator[tuple[TensorSpec, NDArray[Any]]]:
    """Every tensor of the table in order; the same for the same config and seed."""
    rng = np.random.default_rng(seed)
    for spec in _table(config, with_draft):
        yield spec, _values(rng, spec, config)


def _table(config: DeepseekV4Config, with_draft: bool) -> tuple[TensorSpec, ...]:
    return (*tensor_table(config), *(draft_table(config) if with_draft else ()))


def _values(
    rng: np.random.Generator, spec: TensorSpec, config: DeepseekV4Config
) -> NDArray[Any]:
    if spec.kind is TensorKind.TABLE:  # distinct experts for each token
        order = rng.random((spec.shape[0], config.num_experts)).argsort(axis=1)
        return np.ascontiguousarray(order[:, : spec.shape[1]], dtype=np.int64)
    noise = rng.standard_normal(spec.shape, np.float32)
    leaf = spec.name.rsplit(".", 1)[-1]
    if spec.name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if leaf.endswith("_scale"):
        return 0.7 + 0.2 * noise
    if leaf in ("bias", "ape", "attn_sink") or leaf.endswith("_base"):
        return 0.5 * noise
    return noise if spec.name == "embed.weight" else noise / np.float32(spec.shape[-1] ** 0.5)


def config_json(config: DeepseekV4Config) -> dict[str, object]:
    """config.json of a config: in published form where the ratios are 4 and 128.

    Otherwise in the form that transformers writes, which alone can say other ratios.
    """
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
    types = {
        LayerKind.WINDOW: "sliding_attention",
        LayerKind.CSA: "compressed_sparse_attention",
    }
    types[LayerKind.HCA] = "heavily_compressed_attention"
    hashed = config.num_hash_layers
    factor = config.rope_head_dim / config.head_dim
    ropes: dict[str, dict[str, object]] = {}
    for name, rope in (("main", config.rope_main), ("compress", config.rope_compress)):
        ropes[name] = {"rope_theta": rope.theta, "partial_rotary_factor": factor}
        is_yarn = rope.factor != 1.0
        ropes[name] |= {"rope_type": "yarn" if is_yarn else "default"}
        ropes[name] |= {**_yarn(rope), "attention_factor": 1.0} if is_yarn else {}
    return {
        "layer_types": [types[kind] for kind in config.layer_kinds],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (config.num_layers - hashed),
        "compress_rates": {
            types[LayerKind.CSA]: config.csa_ratio,
            types[LayerKind.HCA]: config.hca_ratio,
        },
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
