"""Random Qwen4-Exp checkpoints: for benchmarks and tests, at any size, without torch.

Owns the scale of the numbers: logits of order 1, no constant parameter anywhere, and decays from
nearly none to strong. Loads in transformers 5.24, whose spelling it has: a text model with one
tensor for each expert's matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.qwen4_exp.config import PUBLISHED_KEYS, LayerKind, Qwen4ExpConfig
from cachegraph.models.qwen4_exp.tensors import tensor_table
from cachegraph.models.tensor_specs import TensorKind, TensorSpec
from cachegraph.tools.random_files import write_tensors


def write_checkpoint(
    folder: Path, config: Qwen4ExpConfig, *, seed: int, dtype: str, prefix: str = "model."
) -> Path:
    """Write config.json and model.safetensors, one tensor at a time.

    dtype: as in `write_tensors`. prefix: of every name but the head's.
    """
    tensors = (
        (_spelled(spec, prefix), values) for spec, values in generate_tensors(config, seed)
    )
    specs = [_spelled(spec, prefix) for spec in tensor_table(config)]
    return write_tensors(folder, config_json(config), specs, tensors, dtype)


def generate_tensors(
    config: Qwen4ExpConfig, seed: int
) -> Iterator[tuple[TensorSpec, NDArray[Any]]]:
    """Every tensor of the table in order; the same for the same config and seed."""
    rng = np.random.default_rng(seed)
    for spec in tensor_table(config):
        yield spec, _values(rng, spec)


def _spelled(spec: TensorSpec, prefix: str) -> TensorSpec:
    return spec if spec.name.startswith("lm_head") else replace(spec, name=prefix + spec.name)


def _values(rng: np.random.Generator, spec: TensorSpec) -> NDArray[Any]:
    if spec.values is not None:
        return np.array(spec.values, np.int64)
    noise = rng.standard_normal(spec.shape, np.float32)
    leaf = spec.name.rsplit(".", 1)[-1]
    if spec.is_zero_centred:
        return 0.1 * noise
    if spec.name.endswith("linear_attn.norm.weight"):
        return 1 + 0.1 * noise
    if spec.name.endswith("conv1d.weight"):
        return 0.4 * noise
    if leaf in ("A_log", "dt_bias"):
        return noise - 2 if leaf == "A_log" else 0.5 * noise
    if spec.kind is TensorKind.NGRAM or spec.name == "embed_tokens.weight":
        return noise
    return noise / np.float32(spec.shape[-1] ** 0.5)


def config_json(config: Qwen4ExpConfig) -> dict[str, object]:
    """config.json of a config, as transformers writes that of a text model."""
    own = {"layer_kinds", "rotary_dim", "rope_theta", "mrope_section", "output_gate"}
    own |= {"ple_layers", "ngram_end", "eos_token_ids"}
    plain = {
        PUBLISHED_KEYS.get(name, name): getattr(config, name)
        for name in Qwen4ExpConfig.__dataclass_fields__
        if name not in own
    }
    types = {LayerKind.GDN: "linear_attention", LayerKind.QSA: "indexed_attention"}
    return {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "num_hidden_layers": config.num_layers,
        "layer_types": [types[kind] for kind in config.layer_kinds],
        "hidden_act": "silu",
        "output_gate_type": config.output_gate.value,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "indexer_kv_heads": 1,
        "ple_layer_ids": [layer + 1 for layer in config.ple_layers],
        "eos_token_id": _ends(config),
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
            "mrope_section": list(config.mrope_section),
            "mrope_interleaved": True,
        },
        **plain,
    }


def _ends(config: Qwen4ExpConfig) -> int | list[int] | None:
    """eos_token_id: n-grams are cut at the first."""
    if len(config.eos_token_ids) > 1:
        return list(config.eos_token_ids)
    return config.eos_token_ids[0] if config.eos_token_ids else None
