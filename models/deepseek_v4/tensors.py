"""The tensors of a DeepSeek-V4 text model: names, shapes, what they may be stored as, spellings.

Our names are the published ones without the `model.` prefix (`layers.0.attn.wq_a.weight`). Shapes
are those of torch, [out, in]. Knows nothing of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind
from cachegraph.models.deepseek_v4.refuse import DSPARK, VISION
from cachegraph.models.tensor_specs import FusedPart, Shape, TensorKind, TensorSpec


def tensor_table(config: DeepseekV4Config) -> tuple[TensorSpec, ...]:
    """Every tensor of the main model, in the order of the published checkpoint.

    The MTP block has a table of its own. On V4-Flash these are 34,000 rows, most of them experts.
    """
    hidden, streams = config.hidden_size, config.hc_mult
    specs = [
        _spec("embed.weight", TensorKind.FLOAT_MATRIX, config.vocab_size, hidden),
        *(
            spec
            for layer in range(config.num_layers)
            for spec in block_tensors(config, layer, f"layers.{layer}.")
        ),
        _spec("norm.weight", TensorKind.PARAMETER, hidden),
        _spec("head.weight", TensorKind.FLOAT_MATRIX, config.vocab_size, hidden),
        _spec("hc_head_fn", TensorKind.PARAMETER, streams, streams * hidden),
        _spec("hc_head_base", TensorKind.PARAMETER, streams),
        _spec("hc_head_scale", TensorKind.PARAMETER, 1),
    ]
    return tuple(specs)


def expert_name(layer: int, expert: int, which: str) -> str:
    """Name of one expert's matrix; `which` is w1 (gate), w2 (down) or w3 (up)."""
    return f"layers.{layer}.ffn.experts.{expert}.{which}.weight"


def _spec(name: str, kind: TensorKind, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, kind=kind)


def block_tensors(config: DeepseekV4Config, layer: int, prefix: str) -> Iterator[TensorSpec]:
    """The tensors of one layer's block, under a prefix such as `layers.3.`."""
    hidden, streams = config.hidden_size, config.hc_mult
    mixes = (2 + streams) * streams  # pre, post and comb rows
    for site in ("attn", "ffn"):
        yield _spec(f"{prefix}hc_{site}_fn", TensorKind.PARAMETER, mixes, streams * hidden)
        yield _spec(f"{prefix}hc_{site}_base", TensorKind.PARAMETER, mixes)
        yield _spec(f"{prefix}hc_{site}_scale", TensorKind.PARAMETER, 3)
        yield _spec(f"{prefix}{site}_norm.weight", TensorKind.PARAMETER, hidden)
    yield from _attention(config, f"{prefix}attn.")
    kind = config.layer_kinds[layer]
    if kind is not LayerKind.WINDOW:
        overlap = 2 if kind is LayerKind.CSA else 1
        yield from _compressor(
            f"{prefix}attn.compressor.", hidden, config.ratio(kind), overlap, config.head_dim
        )
    if kind is LayerKind.CSA:
        yield from _indexer(config, f"{prefix}attn.indexer.")
    yield from _feed_forward(config, layer, f"{prefix}ffn.")


def _attention(config: DeepseekV4Config, prefix: str) -> Iterator[TensorSpec]:
    hidden, heads, head = config.hidden_size, config.num_heads, config.head_dim
    rank, groups, out_rank = config.q_lora_rank, config.o_groups, config.o_lora_rank
    matrix, parameter = TensorKind.MATRIX, TensorKind.PARAMETER
    yield _spec(f"{prefix}attn_sink", parameter, heads)
    yield _spec(f"{prefix}wq_a.weight", matrix, rank, hidden)
    yield _spec(f"{prefix}q_norm.weight", parameter, rank)
    yield _spec(f"{prefix}wq_b.weight", matrix, heads * head, rank)
    yield _spec(f"{prefix}wkv.weight", matrix, head, hidden)
    yield _spec(f"{prefix}kv_norm.weight", parameter, head)
    yield _spec(f"{prefix}wo_a.weight", matrix, groups * out_rank, heads * head // groups)
    yield _spec(f"{prefix}wo_b.weight", matrix, hidden, groups * out_rank)


def _compressor(
    prefix: str, hidden: int, ratio: int, overlap: int, head: int
) -> Iterator[TensorSpec]:
    for name in ("wkv", "wgate"):
        yield _spec(f"{prefix}{name}.weight", TensorKind.FLOAT_MATRIX, overlap * head, hidden)
    yield _spec(f"{prefix}ape", TensorKind.PARAMETER, ratio, overlap * head)
    yield _spec(f"{prefix}norm.weight", TensorKind.PARAMETER, head)


def _indexer(config: DeepseekV4Config, prefix: str) -> Iterator[TensorSpec]:
    heads, head = config.index_heads, config.index_head_dim
    yield _spec(f"{prefix}wq_b.weight", TensorKind.MATRIX, heads * head, config.q_lora_rank)
    yield _spec(
        f"{prefix}weights_proj.weight", TensorKind.FLOAT_MATRIX, heads, config.hidden_size
    )
    yield from _compressor(
        f"{prefix}compressor.", config.hidden_size, config.csa_ratio, 2, head
    )


def _feed_forward(config: DeepseekV4Config, layer: int, prefix: str) -> Iterator[TensorSpec]:
    hidden, experts = config.hidden_size, config.num_experts
    yield _spec(f"{prefix}gate.weight", TensorKind.FLOAT_MATRIX, experts, hidden)
    if config.is_hash(layer):
        yield TensorSpec(
            name=f"{prefix}gate.tid2eid",
            shape=(config.vocab_size, config.experts_per_token),
            kind=TensorKind.TABLE,
            below=experts,
        )
    else:
        yield _spec(f"{prefix}gate.bias", TensorKind.PARAMETER, experts)
    for expert in range(experts):
        yield from _swiglu(
            f"{prefix}experts.{expert}.", TensorKind.EXPERT, config.expert_size, hidden
        )
    yield from _swiglu(
        f"{prefix}shared_experts.", TensorKind.MATRIX, config.shared_expert_size, hidden
    )


def _swiglu(prefix: str, kind: TensorKind, size: int, hidden: int) -> Iterator[TensorSpec]:
    yield _spec(f"{prefix}w1.weight", kind, size, hidden)
    yield _spec(f"{prefix}w2.weight", kind, hidden, size)
    yield _spec(f"{prefix}w3.weight", kind, size, hidden)


# Other spellings of the part behind `model.` or `layers.N.`: those of transformers in memory, and
# `attn.norm`, which its save_pretrained (5.24) writes for the published `attn.kv_norm`.
_TOP_ALIASES = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}
_LAYER_ALIASES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"{s}_hc.{p}": f"hc_{s}_{p}" for s in ("attn", "ffn") for p in ("fn", "base", "scale")},
    "attn.norm.weight": "attn.kv_norm.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.compressor.kv_proj.weight": "attn.compressor.wkv.weight",
    "self_attn.compressor.gate_proj.weight": "attn.compressor.wgate.weight",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_norm.weight": "attn.compressor.norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": (
        "attn.indexer.weights_proj.weight"
    ),
    "self_attn.compressor.indexer.kv_proj.weight": "attn.indexer.compressor.wkv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "attn.indexer.compressor.wgate.weight",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_norm.weight": "attn.indexer.compressor.norm.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "mlp.experts.gate_up_proj": "ffn.experts.gate_up",
    "mlp.experts.down_proj": "ffn.experts.down",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_SCALE = re.compile(r"(.+)\.(?:scale|weight_scale_inv)")
_FUSED = re.compile(r"(layers\.\d+\.ffn\.experts)\.(gate_up|down)")


def canonical_name(source: str) -> str:
    """Our name of a tensor in a file, whatever its spelling; an unknown name comes back bare.

    A scale comes back as the weight's name with `.weight` replaced by `.scale`. All experts of a
    layer in one tensor come back as `layers.N.ffn.experts.gate_up` or `.down`; see `fused_parts`.
    """
    name = source.removeprefix("model.")
    renamed = _rename(name)
    scale = _SCALE.fullmatch(renamed)
    if scale is not None:
        return _rename(f"{scale[1]}.weight").removesuffix(".weight") + ".scale"
    return renamed


def _rename(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _TOP_ALIASES.get(name, name)
    return f"layers.{layer[1]}.{_LAYER_ALIASES.get(layer[2], layer[2])}"


def scale_name(spec: TensorSpec) -> str:
    """Canonical name of a packed tensor's scales."""
    return spec.name.removesuffix(".weight") + ".scale"


def fused_shape(config: DeepseekV4Config, name: str) -> Shape | None:
    """[experts, rows, columns] of a canonical fused name; None where the name is not one."""
    match = _FUSED.fullmatch(name)
    if match is None:
        return None
    hidden, size = config.hidden_size, config.expert_size
    rows, columns = (2 * size, hidden) if match[2] == "gate_up" else (hidden, size)
    return config.num_experts, rows, columns


def fused_parts(config: DeepseekV4Config, name: str) -> tuple[FusedPart, ...]:
    """The experts' matrices in a canonical fused name: w1 rows, then w3 rows; or w2."""
    match = _FUSED.fullmatch(name)
    if match is None:
        return ()
    size = config.expert_size
    layout = [("w2", 0, config.hidden_size)]
    if match[2] == "gate_up":
        layout = [("w1", 0, size), ("w3", size, size)]
    return tuple(
        FusedPart(
            name=f"{match[1]}.{expert}.{which}.weight",
            expert=expert,
            first_row=first,
            num_rows=rows,
        )
        for expert in range(config.num_experts)
        for which, first, rows in layout
    )


def is_left_out(name: str) -> bool:
    """Whether a canonical name belongs to the MTP block, which the main graphs do not use."""
    return name.startswith("mtp.")


# A DSpark drafter has three stages and parts of its own; an MTP block is `mtp.0` alone.
_DSPARK_NAME = re.compile(
    r"mtp\.([1-9]|.*\.(main_proj|main_norm|markov_head|confidence_head)\.)"
)


def refusal(name: str) -> str | None:
    """Why a tensor means another architecture; None where it does not."""
    if _DSPARK_NAME.match(name):
        return DSPARK
    if name.endswith(".gate.bias_vl") or name.split(".")[0].startswith("vision"):
        return VISION
    return None
