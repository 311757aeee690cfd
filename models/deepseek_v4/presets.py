"""The published configs of DeepSeek-V4, in published form, by preset name.

Values of V4-Flash are those of its config.json. Those of V4-Pro marked "secondary" were gathered
from public write-ups and configs of other engines, not from the file itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.parse import parse_config
from cachegraph.models.errors import ConfigError

_COMMON: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "compress_rope_theta": 160000,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "max_position_embeddings": 1048576,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rope_theta": 10000,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}

PRESETS: Mapping[str, Mapping[str, object]] = {
    "deepseek-v4-flash": {
        **_COMMON,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5,
        "index_topk": 512,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    },
    "deepseek-v4-pro": {
        **_COMMON,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,  # secondary
        "o_groups": 16,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,  # secondary
        "index_topk": 1024,  # secondary
        # secondary: two HCA layers first, then CSA and HCA in turn; the MTP block has none
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    },
}


def preset_config(name: str) -> DeepseekV4Config:
    """The config of a preset; ConfigError that lists the names where there is none."""
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return parse_config(PRESETS[name])
