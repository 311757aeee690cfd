"""The frozen config of a DeepSeek-V4 text model. Parsing config.json lives in `parse.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """What a layer's attention sees beside its sliding window."""

    WINDOW = "window"  # nothing
    CSA = "csa"  # the indexer's top-k of the ratio-4 rows (overlapping windows)
    HCA = "hca"  # all rows of ratio 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary settings of one RoPE kind. `factor` 1.0 means no YaRN.

    Cos and sin are never scaled (attention factor 1), as in the published reference.
    """

    theta: float
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekV4Config:
    """Sizes and constants of one model; names follow the published config where they can."""

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    num_hash_layers: int
    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    csa_ratio: int = 4
    hca_ratio: int = 128
    index_heads: int
    index_head_dim: int
    index_topk: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_expert_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_main: Rope
    rope_compress: Rope
    max_position: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    num_nextn_layers: int = 0

    @property
    def num_layers(self) -> int:
        """Main layers, the MTP block not counted."""
        return len(self.layer_kinds)

    def ratio(self, kind: LayerKind) -> int:
        """Tokens per compressed row of a layer kind; 0 for window layers."""
        return {LayerKind.CSA: self.csa_ratio, LayerKind.HCA: self.hca_ratio}.get(kind, 0)

    def rope(self, kind: LayerKind) -> Rope:
        """RoPE of a layer kind: the main one in window layers, else the compress one."""
        return self.rope_main if kind is LayerKind.WINDOW else self.rope_compress
