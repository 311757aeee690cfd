"""The tiny DeepSeek-V4 as a transformers model: sizes, seeded start, f16 checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM

from cachegraph.tools.dev.tiny.tokens import BOS_ID, EOS_ID

WINDOW = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
CSA_RATIO = 4

# Matrices that stay f32 in a checkpoint, as published ones keep them.
_KEPT_F32 = ("_hc.", "hc_head", "position_bias")


# 3.2M parameters: every layer kind, hash and routed experts. 16 index heads keep exact ties rare.
_CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "layer_types": [WINDOW, CSA, HCA, CSA, HCA, CSA],
    "sliding_window": 64,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 48,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "moe_intermediate_size": 96,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 0,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "attn_implementation": "eager",  # the one that returns attention weights
}


def new_model(vocab_size: int, seed: int) -> nn.Module:
    """Random weights, two random experts for each token in the hash layer, router biases of 0."""
    torch.manual_seed(seed)
    config = DeepseekV4Config(vocab_size=vocab_size, **_CONFIG)
    model: nn.Module = DeepseekV4ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            order = torch.rand(vocab_size, _CONFIG["n_routed_experts"], generator=generator)
            buffer.copy_(order.argsort(dim=-1)[:, : buffer.shape[1]])
        elif name.endswith("e_score_correction_bias"):
            buffer.zero_()
    return model


def load_model(checkpoint: Path) -> nn.Module:
    """A checkpoint in f32 with eager attention, ready to evaluate."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def save_f16(model: nn.Module, folder: Path) -> None:
    """Write config.json and model.safetensors under published names, big matrices in f16."""
    half: Any = copy.deepcopy(model)
    for name, parameter in half.named_parameters():
        if parameter.ndim >= 2 and not any(part in name for part in _KEPT_F32):
            parameter.data = parameter.data.half()
    half.config.dtype = torch.float16
    half.save_pretrained(folder)


def modules_named(model: nn.Module, class_name: str) -> list[tuple[str, nn.Module]]:
    """Submodules of one class, with their names, in model order."""
    named = model.named_modules()
    return [(name, m) for name, m in named if type(m).__name__ == class_name]
