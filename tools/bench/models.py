"""The models that the bench measures."""

from __future__ import annotations

from pathlib import Path

from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind, Rope
from cachegraph.tools.random_checkpoint import write_checkpoint

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
