"""The models that the bench measures."""

from __future__ import annotations

from pathlib import Path

from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind, Rope
from cachegraph.models.qwen4_exp.config import GateActivation, Qwen4ExpConfig
from cachegraph.models.qwen4_exp.config import LayerKind as HybridKind
from cachegraph.tools import random_qwen4_exp
from cachegraph.tools.random_checkpoint import write_checkpoint

_G, _Q = HybridKind.GDN, HybridKind.QSA
_W, _C, _H = LayerKind.WINDOW, LayerKind.CSA, LayerKind.HCA


def medium_config() -> DeepseekV4Config:
    """A DeepSeek-V4 of 690 million parameters, 160 million of them active per token.

    Head sizes are multiples of 64, so that other engines can run it too.
    """
    return DeepseekV4Config(
        vocab_size=8192,
        hidden_size=1024,
        layer_kinds=(_W, _W, *(_C, _H) * 5),
        num_hash_layers=3,
        num_heads=16,
        head_dim=128,
        rope_head_dim=64,
        q_lora_rank=512,
        o_groups=4,
        o_lora_rank=256,
        sliding_window=128,
        index_heads=16,
        index_head_dim=64,
        index_topk=128,
        num_experts=32,
        experts_per_token=4,
        expert_size=512,
        shared_expert_size=512,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_main=Rope(theta=10000.0),
        rope_compress=Rope(theta=160000.0),
        max_position=131072,
        bos_token_id=0,
        eos_token_ids=(1,),
    )


def medium_checkpoint(folder: Path) -> Path:
    """The random checkpoint of `medium_config`, written once; big matrices in f16 (1.4 GB)."""
    if not (folder / "complete").is_file():
        write_checkpoint(folder, medium_config(), seed=1, dtype="F16")
        (folder / "complete").touch()
    return folder


def hybrid_config() -> Qwen4ExpConfig:
    """A Qwen4-Exp of 320 million parameters, about 150 million of them active per token."""
    return Qwen4ExpConfig(
        vocab_size=4096,
        hidden_size=1024,
        layer_kinds=(_G, _G, _G, _Q) * 3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        rotary_dim=32,
        rope_theta=1e7,
        mrope_section=(6, 5, 5),
        index_heads=4,
        index_head_dim=64,
        index_budget=512,
        index_ratio=4,
        linear_key_heads=8,
        linear_value_heads=16,
        linear_key_dim=64,
        linear_value_dim=64,
        linear_conv_kernel=4,
        output_gate=GateActivation.SIGMOID,
        num_experts=16,
        experts_per_token=4,
        expert_size=384,
        shared_expert_size=384,
        norm_topk_prob=True,
        hc_count=4,
        hc_lowrank=64,
        ple_layers=(1,),
        ple_embed_dim=512,
        ple_conv_kernel=4,
        ngram_size=3,
        ngram_heads=4,
        ngram_base=5003,
        ngram_divisor=16,
        ngram_shards=4,
        ngram_seed=1234,
        ngram_end=1,
        rms_norm_eps=1e-6,
        max_position=65536,
        bos_token_id=0,
        eos_token_ids=(1,),
    )


def hybrid_checkpoint(folder: Path) -> Path:
    """The random checkpoint of `hybrid_config`, written once; big matrices in f16 (0.6 GB)."""
    if not (folder / "complete").is_file():
        random_qwen4_exp.write_checkpoint(folder, hybrid_config(), seed=1, dtype="F16")
        (folder / "complete").touch()
    return folder
