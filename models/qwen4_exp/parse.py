"""config.json of a Qwen4-Exp checkpoint -> Qwen4ExpConfig.

Reads a text config (`qwen4_exp_text`), as transformers 5.24 saves a text model, and a multimodal
one (`qwen4_exp`) that holds it as `text_config`, as published. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from cachegraph.models.config_file import read_config_file
from cachegraph.models.fields import Fields, raise_faults
from cachegraph.models.qwen4_exp.config import (
    GateActivation,
    LayerKind,
    Qwen4ExpConfig,
    value_faults,
)
from cachegraph.models.qwen4_exp.parse_rope import read_rope

MULTIMODAL, TEXT = "qwen4_exp", "qwen4_exp_text"

# The published file says full_attention, transformers indexed_attention: every attention layer of
# this family has an indexer.
_LAYER_TYPES = {
    "linear_attention": LayerKind.GDN,
    "full_attention": LayerKind.QSA,
    "indexed_attention": LayerKind.QSA,
    "qwen_sparse_attention": LayerKind.QSA,
}
_SIZES = {  # config field: key
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "index_heads": "indexer_n_heads",
    "index_head_dim": "indexer_head_dim",
    "index_budget": "indexer_budget",
    "index_ratio": "indexer_compress_ratio",
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim",
    "linear_conv_kernel": "linear_conv_kernel_dim",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_expert_size": "shared_expert_intermediate_size",
    "hc_count": "hc_count",
    "hc_lowrank": "hc_lowrank",
    "max_position": "max_position_embeddings",
}
# Config field: key, and what a model without n-gram embeddings gets where the key is absent.
_NGRAM_SIZES = {
    "ple_conv_kernel": ("ple_conv_kernel_size", 4),
    "ngram_size": ("ngram_size", 3),
    "ngram_heads": ("heads_per_ngram", 1),
    "ngram_base": ("ngram_vocab_size_base", 2),
    "ngram_divisor": ("make_ngram_vocab_size_divisible_by", 1),
    "ngram_shards": ("split_ngram_parts", 1),
}
_SEED = 1234  # the published file leaves it out

# Keys that do not change what the text model computes at inference.
_IGNORED = (
    "_name_or_path",
    "attention_dropout",  # training only
    "dtype",  # each tensor says its own
    "initializer_range",
    "intermediate_size",  # no layer is dense
    "mtp",  # the MTP block is not built
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "number_of_conv_states",  # of transformers' cache
    "output_router_logits",
    "pad_token_id",
    "ple_embedding_dtype",  # each tensor says its own
    "router_aux_loss_coef",  # training only
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
# Keys of the multimodal config that say nothing of the text model; its token ids are those of
# text_config.
_OUTER = (
    "_name_or_path",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "image_token_id",
    "language_model_only",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
)


def load_config(folder: Path) -> Qwen4ExpConfig:
    """The config of a checkpoint folder. ConfigError where config.json is missing or unusable."""
    return parse_config(read_config_file(folder))


def parse_config(raw: Mapping[str, object]) -> Qwen4ExpConfig:
    """The config of the text model in a parsed config.json.

    ConfigError that refuses another architecture, or lists every missing, unknown, unusable and
    contradictory key.
    """
    model_type = raw.get("model_type")
    if model_type not in (MULTIMODAL, TEXT):
        wrong = f"model_type is {model_type!r}; this parser reads {MULTIMODAL!r} and {TEXT!r}"
        raise_faults("this checkpoint", [wrong])
    outer = Fields(raw)
    text = _text_part(outer) if model_type == MULTIMODAL else outer
    if text is None:
        raise_faults("config.json", outer.faults)
    assert text is not None  # it is None only with a fault
    values = _values(text)
    text.finish()
    raise_faults("config.json", (*text.faults, *value_faults(values)))
    names = {field.name for field in fields(Qwen4ExpConfig)}
    return Qwen4ExpConfig(**{name: values[name] for name in names})


def _text_part(outer: Fields) -> Fields | None:
    """The text model's part of a multimodal config, whose other keys are checked."""
    outer.expect("model_type", MULTIMODAL, why="other architectures have other graphs")
    outer.expect(
        "architectures",
        ["Qwen4ExpForConditionalGeneration"],
        why="only the text model of this one is built",
    )
    outer.expect("tie_word_embeddings", False, why="the head has its own weights")
    _packing(outer)
    outer.ignore(_OUTER)
    text = outer.child("text_config")
    outer.finish()
    return text


def _values(text: Fields) -> dict[str, Any]:
    """Every config field; None where it cannot be read."""
    values: dict[str, Any] = {field: text.integer(key) for field, key in _SIZES.items()}
    values["rms_norm_eps"] = text.number("rms_norm_eps")
    values["layer_kinds"] = _layers(text)
    values |= read_rope(text, values["head_dim"])
    values["output_gate"] = _output_gate(text)
    values["norm_topk_prob"] = text.flag("norm_topk_prob", default=True)
    values |= _special_tokens(text)
    values |= _ngrams(text, values)
    _expectations(text)
    text.ignore(_IGNORED)
    return values


def _expectations(text: Fields) -> None:
    """Keys that are read only to make sure that they say what this family always does."""
    expect = text.expect
    expect("model_type", TEXT, why="other architectures have other graphs")
    expect(
        "architectures",
        ["Qwen4ExpForCausalLM"],
        ["Qwen4ExpForConditionalGeneration"],
        why="only the text model is built",
    )
    expect("hidden_act", "silu", why="experts and convolutions use SiLU")
    expect("attention_bias", False, why="no projection has a bias")
    expect("attn_output_gate", True, why="attention is always gated")
    expect("tie_word_embeddings", False, why="the head has its own weights")
    expect("mamba_ssm_dtype", "float32", why="recurrent states are float32")
    expect("mlp_only_layers", [], why="every layer has experts")
    expect("decoder_sparse_step", 1, why="every layer has experts")
    if text.integer("indexer_kv_heads") is not None:
        expect("indexer_kv_heads", 1, why="all heads of the indexer share one key")
    _packing(text)


def _packing(part: Fields) -> None:
    """quantization_config, where there is one: which forms of weights are read."""
    if not part.has("quantization_config"):
        part.ignore(("quantization_config",))
        return
    packing = part.child("quantization_config")
    if packing is None:
        return
    packing.expect("quant_method", "fp8", why="no other packing is read")
    packing.expect("fmt", "e4m3", why="no other 8-bit float is read")
    packing.expect("weight_block_size", [128, 128], why="scales cover 128 x 128 blocks")
    packing.expect("weight_per_tensor", False, why="scales cover 128 x 128 blocks")
    # How activations were to be rounded, and what was left unpacked: each tensor says it.
    packing.ignore(
        (
            "act_per_tensor",
            "activation_scheme",
            "dequantize",
            "modules_to_convert",
            "modules_to_not_convert",
            "scale_fmt",
        )
    )
    packing.finish()


def _layers(text: Fields) -> tuple[LayerKind, ...] | None:
    """Layer kinds from names, or from every how many layers one has attention."""
    count = text.integer("num_hidden_layers")
    text.ignore(("layer_types", "full_attention_interval"))
    spaced = _spaced(text, count) if text.has("full_attention_interval") else None
    if not text.has("layer_types") and text.has("full_attention_interval"):
        return spaced
    names = text.strings("layer_types")
    if names is None or count is None:
        return None
    unknown = sorted(set(names) - set(_LAYER_TYPES))
    if unknown:
        text.note(f"layer_types holds {unknown}; only {list(_LAYER_TYPES)} are known")
    if len(names) != count:
        text.note(f"layer_types has {len(names)} entries; num_hidden_layers is {count}")
    if unknown or len(names) != count:
        return None
    kinds = tuple(_LAYER_TYPES[name] for name in names)
    if spaced is not None and spaced != kinds:
        text.note("layer_types and full_attention_interval disagree")
    return kinds


def _spaced(text: Fields, count: int | None) -> tuple[LayerKind, ...] | None:
    interval = text.integer("full_attention_interval")
    if interval is None or count is None:
        return None
    if interval < 1:
        text.note(f"full_attention_interval is {interval}; it must be 1 or more")
        return None
    return tuple(
        LayerKind.GDN if (layer + 1) % interval else LayerKind.QSA for layer in range(count)
    )


def _output_gate(text: Fields) -> GateActivation | None:
    """The activation named, or that of the whole model, which is SiLU."""
    allowed = [activation.value for activation in GateActivation]
    text.expect("output_gate_type", *allowed, why="the gate has one of these activations")
    if not text.has("output_gate_type"):
        return GateActivation.SILU
    name = text.text("output_gate_type")
    return GateActivation(name) if name in allowed else None


def _special_tokens(text: Fields) -> dict[str, Any]:
    """bos_token_id, eos_token_ids and the id at which n-grams are cut.

    Where several tokens end a text, n-grams are cut at the first, as transformers does.
    """
    bos = text.integer("bos_token_id") if text.has("bos_token_id") else None
    ends: tuple[int, ...] = ()
    if text.is_list("eos_token_id"):
        ends = text.integers("eos_token_id") or ()
    elif text.has("eos_token_id") and (end := text.integer("eos_token_id")) is not None:
        ends = (end,)
    text.ignore(("bos_token_id", "eos_token_id"))
    return {
        "bos_token_id": bos,
        "eos_token_ids": ends,
        "ngram_end": ends[0] if ends else None,
    }


def _ngrams(text: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    """What concerns n-gram embeddings. Layer numbers are counted from 1 in the file."""
    numbers = text.integers("ple_layer_ids") if text.has("ple_layer_ids") else ()
    has_tables = bool(numbers)
    text.ignore(("ple_layer_ids", "ple_embed_dim", "seed"))
    text.ignore(key for key, _ in _NGRAM_SIZES.values())
    found: dict[str, Any] = {
        "ple_layers": None if numbers is None else tuple(sorted({n - 1 for n in numbers})),
        "ngram_seed": text.integer("seed") if text.has("seed") else _SEED,
    }
    for field, (key, absent) in _NGRAM_SIZES.items():
        found[field] = text.integer(key) if has_tables or text.has(key) else absent
    if text.has("ple_embed_dim"):
        found["ple_embed_dim"] = text.integer("ple_embed_dim")
    else:
        found["ple_embed_dim"] = values["hidden_size"]
    if values["ngram_end"] is None:
        if has_tables:
            text.note("eos_token_id is missing; n-grams are cut at it")
        else:
            found["ngram_end"] = 0  # nothing is hashed
    return found
