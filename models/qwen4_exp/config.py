"""The frozen config of a Qwen4-Exp text model, checked when made.

Parsing config.json lives in `parse.py`, the JSON form of this class in `serial.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from cachegraph.models.fields import raise_faults
from cachegraph.models.ngram_spec import NgramSpec, ngram_spec


class LayerKind(StrEnum):
    """What mixes the tokens of a layer."""

    GDN = "gdn"  # gated delta rule: a recurrent state
    QSA = "qsa"  # attention to the pools of tokens that an indexer chooses


class GateActivation(StrEnum):
    """Activation of the output gate of gated delta layers."""

    SIGMOID = "sigmoid"
    SILU = "silu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen4ExpConfig:
    """Sizes and constants of one model; names follow the published config where they can.

    ple_layers: 0-based numbers of the layers with an n-gram embedding, ascending. mrope_section:
    rotary frequencies of t, y and x. Raises ConfigError that lists every value out of range and
    every contradiction.
    """

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    index_heads: int
    index_head_dim: int
    index_budget: int
    index_ratio: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    linear_conv_kernel: int
    output_gate: GateActivation
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_expert_size: int
    norm_topk_prob: bool
    hc_count: int
    hc_lowrank: int
    ple_layers: tuple[int, ...]
    ple_embed_dim: int
    ple_conv_kernel: int
    ngram_size: int
    ngram_heads: int  # of each order
    ngram_base: int  # the smallest prime of the hash is not below it
    ngram_divisor: int  # table rows are rounded up to a multiple of it
    ngram_shards: int  # parts of a table in the checkpoint
    ngram_seed: int
    ngram_end: int  # the token that cuts a text for the hash
    rms_norm_eps: float
    max_position: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        raise_faults("this Qwen4-Exp config", value_faults(values))

    @property
    def num_layers(self) -> int:
        """Main layers, the MTP block not counted."""
        return len(self.layer_kinds)

    @property
    def stream_width(self) -> int:
        """Values of all residual streams of a token."""
        return self.hc_count * self.hidden_size

    @property
    def conv_channels(self) -> int:
        """Channels of a gated delta layer's convolution: queries, keys, values."""
        return (
            2 * self.linear_key_heads * self.linear_key_dim
            + self.linear_value_heads * self.linear_value_dim
        )

    @property
    def conv_history(self) -> int:
        """Earlier tokens that this convolution reads."""
        return self.linear_conv_kernel - 1

    @property
    def state_width(self) -> int:
        """Values of a gated delta layer's recurrent state."""
        return self.linear_value_heads * self.linear_key_dim * self.linear_value_dim

    @property
    def ngram_history(self) -> int:
        """Earlier tokens that the convolution over hashed n-grams reads."""
        return (self.ple_conv_kernel - 1) * self.ngram_size

    @property
    def ngram_total_heads(self) -> int:
        """Heads of one n-gram table, of all orders."""
        return self.ngram_heads * (self.ngram_size - 1)

    @property
    def ngram_head_dim(self) -> int:
        """Values of a row of an n-gram table."""
        return self.ple_embed_dim // self.ngram_total_heads

    @property
    def top_pools(self) -> int:
        """Pools that one query of the indexer keeps."""
        return self.index_budget // self.index_ratio

    def ngram(self, module: int) -> NgramSpec:
        """The hash of the n-gram embedding number `module`, that of ple_layers[module]."""
        return ngram_spec(
            size=self.ngram_size,
            heads=self.ngram_heads,
            base=self.ngram_base,
            vocab=self.vocab_size,
            seed=self.ngram_seed,
            module=module,
            end=self.ngram_end,
        )

    def ngram_rows(self, module: int) -> int:
        """Rows of an n-gram table as stored: those that are addressed, rounded up."""
        return -(-self.ngram(module).table_rows // self.ngram_divisor) * self.ngram_divisor


# Config fields whose published key has another name, for messages.
PUBLISHED_KEYS = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "index_heads": "indexer_n_heads",
    "index_head_dim": "indexer_head_dim",
    "index_budget": "indexer_budget",
    "index_ratio": "indexer_compress_ratio",
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim",
    "linear_conv_kernel": "linear_conv_kernel_dim",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_expert_size": "shared_expert_intermediate_size",
    "ple_layers": "ple_layer_ids",
    "ple_conv_kernel": "ple_conv_kernel_size",
    "ngram_heads": "heads_per_ngram",
    "ngram_base": "ngram_vocab_size_base",
    "ngram_divisor": "make_ngram_vocab_size_divisible_by",
    "ngram_shards": "split_ngram_parts",
    "ngram_seed": "seed",
    "ngram_end": "eos_token_id",
    "max_position": "max_position_embeddings",
}

_FROM_ONE = (
    "vocab_size",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "index_heads",
    "index_head_dim",
    "index_budget",
    "linear_key_heads",
    "linear_value_heads",
    "linear_key_dim",
    "linear_value_dim",
    "num_experts",
    "experts_per_token",
    "expert_size",
    "shared_expert_size",
    "hc_count",
    "hc_lowrank",
    "ple_embed_dim",
    "ngram_heads",
    "ngram_base",
    "ngram_divisor",
    "ngram_shards",
    "max_position",
)
_FROM_TWO = (
    "rotary_dim",
    "index_ratio",
    "linear_conv_kernel",
    "ple_conv_kernel",
    "ngram_size",
)

Rule = tuple[tuple[str, ...], Callable[..., bool], str]
_RULES: tuple[Rule, ...] = (
    (("layer_kinds",), lambda kinds: len(kinds) > 0, "the model has no layers"),
    (("rotary_dim",), lambda rotary: rotary % 2 == 0, "the {} rotated channels are odd"),
    (
        ("rotary_dim", "head_dim"),
        lambda rotary, head: rotary <= head,
        "{} rotated channels are more than head_dim {}",
    ),
    (
        ("rotary_dim", "index_head_dim"),
        lambda rotary, head: rotary <= head,
        "{} rotated channels are more than indexer_head_dim {}",
    ),
    (
        ("mrope_section", "rotary_dim"),
        lambda parts, rotary: len(parts) == 3 and min(parts) >= 0 and 2 * sum(parts) == rotary,
        "mrope_section {} does not add up to half of the {} rotated channels",
    ),
    (("rope_theta",), lambda theta: theta > 1, "rope_theta is {}; it must be greater than 1"),
    (
        ("rms_norm_eps",),
        lambda eps: eps > 0,
        "rms_norm_eps is {}; it must be greater than 0",
    ),
    (
        ("num_heads", "num_kv_heads"),
        lambda heads, shared: heads % shared == 0,
        "num_attention_heads {} is not a multiple of num_key_value_heads {}",
    ),
    (
        ("linear_value_heads", "linear_key_heads"),
        lambda values, keys: values % keys == 0,
        "linear_num_value_heads {} is not a multiple of linear_num_key_heads {}",
    ),
    (
        ("index_budget", "index_ratio"),
        lambda budget, ratio: budget % ratio == 0,
        "indexer_budget {} is not a multiple of indexer_compress_ratio {}",
    ),
    (
        ("experts_per_token", "num_experts"),
        lambda chosen, all_: chosen <= all_,
        "num_experts_per_tok {} is greater than num_experts {}",
    ),
    (
        ("ple_embed_dim", "ngram_size", "ngram_heads"),
        lambda width, size, heads: width % ((size - 1) * heads) == 0,
        "ple_embed_dim {} is not a multiple of the heads of n-grams up to {}, {} of each order",
    ),
    (
        ("ple_layers", "layer_kinds"),
        lambda layers, kinds: all(0 <= n < len(kinds) for n in layers),
        "ple layers {} (counted from 0) reach beyond the last layer",
    ),
    (
        ("ple_layers",),
        lambda layers: list(layers) == sorted(set(layers)),
        "ple layers {} are not ascending",
    ),
    (
        ("ple_layers", "layer_kinds"),
        lambda layers, kinds: all(
            kinds[n] is LayerKind.GDN for n in layers if 0 <= n < len(kinds)
        ),
        "ple layers {} (counted from 0) are not all gated delta layers",
    ),
    (
        ("ngram_end", "vocab_size"),
        lambda token, size: 0 <= token < size,
        "eos_token_id {}, at which n-grams are cut, is outside the vocabulary of {}",
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
    for least, names in ((1, _FROM_ONE), (2, _FROM_TWO)):
        for name in names:
            if known.get(name, least) < least:
                key = PUBLISHED_KEYS.get(name, name)
                wrong[name] = f"{key} is {known[name]}; it must be {least} or more"
    faults = list(wrong.values())
    for rule_names, holds, message in _RULES:
        usable = all(name in known and name not in wrong for name in rule_names)
        arguments = [known[name] for name in rule_names] if usable else []
        if usable and not holds(*arguments):
            faults.append(message.format(*arguments))
    return faults
