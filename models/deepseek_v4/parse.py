"""config.json of a DeepSeek-V4 checkpoint -> DeepseekV4Config.

Reads two spellings: the published one (`compress_ratios`, `num_hash_layers`, `rope_scaling`) and
the one that transformers 5.24 writes (`layer_types`, `mlp_layer_types`, `compress_rates`,
`rope_parameters`). Where both are given they must agree. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from cachegraph.models.config_file import read_config_file
from cachegraph.models.deepseek_v4.config import (
    DeepseekV4Config,
    LayerKind,
    value_faults,
)
from cachegraph.models.deepseek_v4.parse_rope import read_ropes
from cachegraph.models.deepseek_v4.refuse import refusals
from cachegraph.models.fields import Fields, raise_faults

Meaning = TypeVar("Meaning")

_LAYER_TYPES = {
    "sliding_attention": LayerKind.WINDOW,
    "compressed_sparse_attention": LayerKind.CSA,
    "heavily_compressed_attention": LayerKind.HCA,
}
_SIZES = {  # config field: key
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "sliding_window": "sliding_window",
    "index_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "max_position": "max_position_embeddings",
}
_NUMBERS = ("routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps")

# Keys that do not change what the model computes at inference.
_IGNORED = (
    "_name_or_path",
    "attention_dropout",  # training only
    "dtype",  # each tensor says its own
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "router_aux_loss_coef",  # training only
    "router_jitter_noise",  # training only
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


def load_config(folder: Path) -> DeepseekV4Config:
    """The config of a checkpoint folder. ConfigError where config.json is missing or unusable."""
    return parse_config(read_config_file(folder))


def parse_config(raw: Mapping[str, object]) -> DeepseekV4Config:
    """The config in a parsed config.json.

    ConfigError says by name why another architecture is refused, or lists every missing, unknown,
    unusable and contradictory key.
    """
    raise_faults("this checkpoint", refusals(raw))
    top = Fields(raw)
    values: dict[str, Any] = {field: top.integer(key) for field, key in _SIZES.items()}
    values |= {name: top.number(name) for name in _NUMBERS}
    values["shared_expert_size"] = values["expert_size"]
    values["num_nextn_layers"] = (
        top.integer("num_nextn_predict_layers") if top.has("num_nextn_predict_layers") else 0
    )
    values |= _layers(top)
    ropes = read_ropes(top, values["head_dim"])
    values["rope_head_dim"], values["rope_main"], values["rope_compress"] = ropes
    values["bos_token_id"], values["eos_token_ids"] = _special_tokens(top)
    _expectations(top)
    top.ignore(_IGNORED)
    top.finish()
    raise_faults("config.json", (*top.faults, *value_faults(values)))
    names = {field.name for field in fields(DeepseekV4Config)}
    return DeepseekV4Config(**{name: values[name] for name in names})


def _expectations(top: Fields) -> None:
    """Keys that are read only to make sure that they say what this family always does."""
    expect = top.expect
    expect("model_type", "deepseek_v4", why="other architectures have other graphs")
    expect("architectures", ["DeepseekV4ForCausalLM"], why="only the text model is built")
    expect("hidden_act", "silu", why="the experts are SwiGLU")
    expect("scoring_func", "sqrtsoftplus", why="the router's score is built in")
    expect("topk_method", "noaux_tc", why="the router picks by score plus bias")
    expect("norm_topk_prob", True, why="expert weights are always normalised")
    expect("num_key_value_heads", 1, why="keys and values are one shared row")
    expect("n_shared_experts", 1, why="the shared expert is as wide as a routed one")
    for key in ("attention_bias", "mlp_bias"):
        expect(key, False, why="no projection has a bias")
    expect("tie_word_embeddings", False, why="the head has its own weights")
    expect("expert_dtype", "fp4", "fp8", why="no other packed experts are read")
    if top.has("quantization_config") and (packing := top.child("quantization_config")):
        packing.expect("quant_method", "fp8", why="no other packing is read")
        packing.expect("fmt", "e4m3", why="no other 8-bit float is read")
        packing.expect("scale_fmt", "ue8m0", "float", why="scales are powers of two or floats")
        packing.expect("weight_block_size", [128, 128], why="scales cover 128 x 128 blocks")
        packing.expect("expert_dtype", "fp4", "fp8", why="no other packed experts are read")
        # How activations were to be rounded, and what was left unpacked: each tensor says it.
        packing.ignore(("activation_scheme", "dequantize", "modules_to_not_convert"))
        packing.finish()
    else:
        top.ignore(("quantization_config",))


def _special_tokens(top: Fields) -> tuple[int | None, tuple[int, ...]]:
    """bos_token_id and eos_token_id; both may be absent, the second may be a list."""
    bos = top.integer("bos_token_id") if top.has("bos_token_id") else None
    top.ignore(("bos_token_id", "eos_token_id"))
    if not top.has("eos_token_id"):
        return bos, ()
    if top.is_list("eos_token_id"):
        return bos, top.integers("eos_token_id") or ()
    eos = top.integer("eos_token_id")
    return bos, () if eos is None else (eos,)


def _layers(top: Fields) -> dict[str, Any]:
    """layer_kinds, num_hash_layers, csa_ratio and hca_ratio; None where they cannot be read."""
    count = top.integer("num_hidden_layers")
    ratios = {LayerKind.CSA: 4, LayerKind.HCA: 128}
    if top.has("compress_rates") and (rates := top.child("compress_rates")):
        for name, kind in list(_LAYER_TYPES.items())[1:]:
            if rates.has(name) and (ratio := rates.integer(name)) is not None:
                ratios[kind] = ratio
        rates.finish()
    top.ignore(("compress_rates", "layer_types", "compress_ratios"))
    if top.has("compress_ratios") or not top.has("layer_types"):
        kinds = _kinds_from_ratios(top, count, ratios)
    else:
        kinds = None
    if top.has("layer_types"):
        named = _named(top, "layer_types", count, _LAYER_TYPES)
        if kinds is not None and named is not None and kinds != named:
            top.note("layer_types and compress_ratios disagree")
        kinds = named if kinds is None else kinds
    return {
        "layer_kinds": kinds,
        "num_hash_layers": _hash_layers(top, count),
        "csa_ratio": ratios[LayerKind.CSA],
        "hca_ratio": ratios[LayerKind.HCA],
    }


def _kinds_from_ratios(
    top: Fields, count: int | None, ratios: Mapping[LayerKind, int]
) -> tuple[LayerKind, ...] | None:
    """Layer kinds from one ratio per layer, with or without an entry for the MTP block."""
    entries = top.integers("compress_ratios")
    if entries is None or count is None:
        return None
    if len(entries) not in (count, count + 1):
        top.note(
            f"compress_ratios has {len(entries)} entries; num_hidden_layers {count} allows "
            f"{count}, or {count + 1} with one for the MTP block"
        )
        return None
    if any(entries[count:]):
        top.note(
            f"compress_ratios gives the MTP block, entry {count}, the ratio {entries[count]}; "
            "it must be 0: the block has window attention only"
        )
    kind_of = {ratios[kind]: kind for kind in ratios} | {0: LayerKind.WINDOW}
    unknown = sorted({ratio for ratio in entries[:count] if ratio not in kind_of})
    if len(kind_of) < 3:
        top.note("compress_rates gives two kinds one ratio, so compress_ratios is ambiguous")
    elif unknown:
        top.note(f"compress_ratios holds {unknown}; only {sorted(kind_of)} are known")
    else:
        return tuple(kind_of[ratio] for ratio in entries[:count])
    return None


def _named(
    top: Fields, key: str, count: int | None, meanings: Mapping[str, Meaning]
) -> tuple[Meaning, ...] | None:
    """A list with one known name per layer."""
    names = top.strings(key)
    if names is None or count is None:
        return None
    unknown = sorted(set(names) - set(meanings))
    if len(names) != count:
        top.note(f"{key} has {len(names)} entries; num_hidden_layers is {count}")
    if unknown:
        top.note(f"{key} holds {unknown}; only {list(meanings)} are known")
    if unknown or len(names) != count:
        return None
    return tuple(meanings[name] for name in names)


def _hash_layers(top: Fields, count: int | None) -> int | None:
    """How many leading layers route by the token-to-expert table."""
    top.ignore(("num_hash_layers", "mlp_layer_types"))
    given = None
    if top.has("num_hash_layers") or not top.has("mlp_layer_types"):
        given = top.integer("num_hash_layers")
    if not top.has("mlp_layer_types"):
        return given
    hashed = _named(top, "mlp_layer_types", count, {"hash_moe": True, "moe": False})
    if hashed is None:
        return given
    named = sum(hashed)
    if any(hashed[named:]):
        top.note("mlp_layer_types mixes hash_moe and moe; hash layers must come first")
    elif given is not None and given != named:
        top.note(f"num_hash_layers is {given}, mlp_layer_types has {named} hash_moe layers")
    return named
