"""The frozen config of a DeepSeek-V4 text model, checked when made.

Parsing config.json lives in `parse.py`, the JSON form of this class in `serial.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from cachegraph.models.fields import raise_faults


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
    """Sizes and constants of one model; names follow the published config where they can.

    Raises ConfigError that lists every value out of range and every contradiction.
    """

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

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        raise_faults("this DeepSeek-V4 config", value_faults(values))

    @property
    def num_layers(self) -> int:
        """Main layers, the MTP block not counted."""
        return len(self.layer_kinds)

    @property
    def draft(self) -> DeepseekV4Config:
        """The MTP block as a model of one layer, whatever the main layers are.

        Its attention sees the window alone and its experts are chosen by score.
        """
        return replace(
            self, layer_kinds=(LayerKind.WINDOW,), num_hash_layers=0, num_nextn_layers=0
        )

    def part(self, layers: Sequence[int]) -> DeepseekV4Config:
        """The model as it is to a graph of some of its layers: only their kinds are there."""
        kinds = tuple(self.layer_kinds[number] for number in layers)
        return replace(self, layer_kinds=kinds, num_hash_layers=0, num_nextn_layers=0)

    def ratio(self, kind: LayerKind) -> int:
        """Tokens per compressed row of a layer kind; 0 for window layers."""
        return {LayerKind.CSA: self.csa_ratio, LayerKind.HCA: self.hca_ratio}.get(kind, 0)

    def rope(self, kind: LayerKind) -> Rope:
        """RoPE of a layer kind: the main one in window layers, else the compress one."""
        return self.rope_main if kind is LayerKind.WINDOW else self.rope_compress

    def is_hash(self, layer: int) -> bool:
        """Whether a layer's experts come from the token-to-expert table, not from scores."""
        return layer < self.num_hash_layers


# Config fields whose published key has another name, for messages.
PUBLISHED_KEYS = {
    "num_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "index_heads": "index_n_heads",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "csa_ratio": "compress_rates.compressed_sparse_attention",
    "hca_ratio": "compress_rates.heavily_compressed_attention",
    "max_position": "max_position_embeddings",
    "num_nextn_layers": "num_nextn_predict_layers",
}

_FROM_ONE = (
    "vocab_size",
    "hidden_size",
    "num_heads",
    "head_dim",
    "rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "csa_ratio",
    "hca_ratio",
    "index_heads",
    "index_head_dim",
    "index_topk",
    "num_experts",
    "experts_per_token",
    "expert_size",
    "shared_expert_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position",
)
_FROM_ZERO = ("num_hash_layers", "num_nextn_layers", "hc_eps")
_ABOVE_ZERO = ("routed_scaling_factor", "swiglu_limit", "rms_norm_eps")

Rule = tuple[tuple[str, ...], Callable[..., bool], str]
_RULES: tuple[Rule, ...] = (
    (("layer_kinds",), lambda kinds: len(kinds) > 0, "the model has no layers"),
    (
        ("num_heads", "o_groups"),
        lambda heads, groups: heads % groups == 0,
        "num_attention_heads {} is not a multiple of o_groups {}",
    ),
    (("rope_head_dim",), lambda rope: rope % 2 == 0, "qk_rope_head_dim {} is odd"),
    (
        ("rope_head_dim", "head_dim"),
        lambda rope, head: rope <= head,
        "qk_rope_head_dim {} is greater than head_dim {}",
    ),
    (
        ("rope_head_dim", "index_head_dim"),
        lambda rope, head: rope <= head,
        "qk_rope_head_dim {} is greater than index_head_dim {}",
    ),
    (
        ("experts_per_token", "num_experts"),
        lambda chosen, all_: chosen <= all_,
        "num_experts_per_tok {} is greater than n_routed_experts {}",
    ),
    (
        ("num_hash_layers", "layer_kinds"),
        lambda hashed, kinds: hashed <= len(kinds),
        "num_hash_layers {} is greater than the number of layers in {}",
    ),
    (
        ("bos_token_id", "vocab_size"),
        lambda token, size: 0 <= token < size,
        "bos_token_id {} is outside the vocabulary of {}",
    ),
    (
        ("eos_token_ids", "vocab_size"),
        lambda tokens, size: all(0 <= token < size for token in tokens),
        "eos_token_id {} is outside the vocabulary of {}",
    ),
)


def value_faults(values: Mapping[str, Any]) -> list[str]:
    """Every value out of range and every contradiction among config fields.

    A field that is absent or None is taken as not known: rules about it are skipped, so that a
    parser can ask with what it could read.
    """
    known = {name: value for name, value in values.items() if value is not None}
    wrong: dict[str, str] = {}
    for least, names in ((1, _FROM_ONE), (0, _FROM_ZERO)):
        for name in names:
            if known.get(name, least) < least:
                wrong[name] = f"{_key(name)} is {known[name]}; it must be {least} or more"
    for name in _ABOVE_ZERO:
        if known.get(name, 1) <= 0:
            wrong[name] = f"{_key(name)} is {known[name]}; it must be greater than 0"
    faults = list(wrong.values())
    for name in ("rope_main", "rope_compress"):
        if name in known:
            faults += _rope_faults(name, known[name])
    for rule_names, holds, message in _RULES:
        usable = all(name in known and name not in wrong for name in rule_names)
        arguments = [known[name] for name in rule_names] if usable else []
        if usable and not holds(*arguments):
            faults.append(message.format(*arguments))
    return faults


def _rope_faults(name: str, rope: Rope) -> list[str]:
    faults = []
    if rope.theta <= 1:
        faults.append(f"{name}: rope theta is {rope.theta}; it must be greater than 1")
    if rope.factor < 1:
        faults.append(f"{name}: yarn factor is {rope.factor}; it must be 1 or more")
    if rope.factor > 1 and rope.original_context < 1:
        faults.append(f"{name}: yarn needs original_max_position_embeddings of 1 or more")
    if not 0 < rope.beta_slow < rope.beta_fast:
        faults.append(
            f"{name}: yarn needs 0 < beta_slow < beta_fast, got {rope.beta_slow} and "
            f"{rope.beta_fast}"
        )
    return faults


def _key(name: str) -> str:
    return PUBLISHED_KEYS.get(name, name)
