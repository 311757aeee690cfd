"""The tiny Qwen4-Exp as a transformers model: sizes and seeded start."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from cachegraph.tools.dev.tiny.tokens import BOS_ID, EOS_ID

DELTA, ATTENTION = "linear_attention", "full_attention"

# Every feature of the published model. 16 index heads keep exact ties rare.
_CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "layer_types": [DELTA, DELTA, ATTENTION, DELTA, DELTA, ATTENTION],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "hc_count": 4,
    "hc_lowrank": 16,
    "ple_layer_ids": [2],  # counted from 1
    "ple_embed_dim": 128,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 1009,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 4,
    "seed": 1234,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}


def new_model(vocab_size: int, seed: int) -> nn.Module:
    """Random weights; those that transformers starts at zero are drawn too, so that all train."""
    torch.manual_seed(seed)
    config = Qwen4ExpTextConfig(vocab_size=vocab_size, **_CONFIG)
    config._attn_implementation = "eager"  # the one that returns attention weights
    model: nn.Module = Qwen4ExpForCausalLM(config)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if name.endswith(("conv1d.weight", "hyper_connection_mixer.hc_norm.weight")):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model
