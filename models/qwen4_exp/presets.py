"""The published configs of Qwen4-Exp, in published form, by preset name.

The values were gathered from several public transcriptions of config.json that agree, not from the
file itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from cachegraph.models.errors import ConfigError
from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig
from cachegraph.models.qwen4_exp.parse import parse_config

_FLASH_NEXT_TEXT: dict[str, object] = {
    "model_type": "qwen4_exp_text",
    "attention_bias": False,
    "bos_token_id": 248044,
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "hc_count": 4,
    "hc_lowrank": 320,
    "head_dim": 256,
    "heads_per_ngram": 8,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 128,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "make_ngram_vocab_size_divisible_by": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 640,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "ngram_size": 3,
    "ngram_vocab_size_base": 20_000_000,
    "num_attention_heads": 24,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_gate_type": "sigmoid",
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "ple_conv_kernel_size": 4,
    "ple_embed_dim": 2560,
    "ple_layer_ids": [2],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
    "shared_expert_intermediate_size": 640,
    "split_ngram_parts": 128,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}

PRESETS: Mapping[str, Mapping[str, object]] = {
    "qwen3.8-flash-next": {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "image_token_id": 248056,
        "text_config": _FLASH_NEXT_TEXT,
        "tie_word_embeddings": False,
        "video_token_id": 248057,
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    },
}


def preset_config(name: str) -> Qwen4ExpConfig:
    """The config of a preset; ConfigError that lists the names where there is none."""
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return parse_config(PRESETS[name])
