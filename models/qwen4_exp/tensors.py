"""The tensors of a Qwen4-Exp text model: names, shapes, what they may be stored as, spellings.

Our names are the published ones without a prefix (`layers.0.linear_attn.in_proj_qkv.weight`).
Shapes are those of torch, [out, in]. Knows nothing of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import ceil

from cachegraph.models.qwen4_exp.config import LayerKind, Qwen4ExpConfig
from cachegraph.models.tensor_specs import (
    Fused,
    FusedPart,
    Shape,
    TensorKind,
    TensorSpec,
    TensorTable,
)


def checkpoint_table(config: Qwen4ExpConfig) -> TensorTable:
    """Every tensor of the text model, and how files spell them."""
    return TensorTable(
        family="Qwen4-Exp",
        specs=tensor_table(config),
        canonical=canonical_name,
        fused=lambda name: fused_experts(config, name),
        scale=scale_name,
        is_left_out=lambda name: left_out_part(name) is not None,
        refusal=lambda name: None,
    )


def tensor_table(config: Qwen4ExpConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of the text model; the MTP block and the vision tower are not among them."""
    hidden = config.hidden_size
    return (
        _spec("embed_tokens.weight", TensorKind.FLOAT_MATRIX, config.vocab_size, hidden),
        *(spec for layer in range(config.num_layers) for spec in _layer(config, layer)),
        *_mixer(config, "hyper_connection_mixer.", injects=False),
        _spec("lm_head.weight", TensorKind.FLOAT_MATRIX, config.vocab_size, hidden),
    )


def expert_name(layer: int, expert: int, which: str) -> str:
    """Name of one expert's matrix; `which` is gate, up or down."""
    return f"layers.{layer}.mlp.experts.{expert}.{which}_proj.weight"


def ngram_shards(config: Qwen4ExpConfig, layer: int) -> tuple[str, ...]:
    """Names of the parts of a layer's n-gram table, whose rows follow each other in this order."""
    prefix = f"layers.{layer}.ple."
    return tuple(spec.name for spec in _shards(config, config.ple_layers.index(layer), prefix))


def _spec(name: str, kind: TensorKind, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, kind=kind)


def _norm(name: str, width: int) -> TensorSpec:
    """A norm's weight as nearly all of this family are stored: less one."""
    return TensorSpec(
        name=name, shape=(width,), kind=TensorKind.PARAMETER, is_zero_centred=True
    )


def _layer(config: Qwen4ExpConfig, layer: int) -> Iterator[TensorSpec]:
    prefix = f"layers.{layer}."
    if layer in config.ple_layers:
        yield from _ngram_embedding(config, config.ple_layers.index(layer), f"{prefix}ple.")
    yield from _mixer(config, f"{prefix}attn_hyper_connection.", injects=True)
    if config.layer_kinds[layer] is LayerKind.GDN:
        yield from _linear_attention(config, f"{prefix}linear_attn.")
    else:
        yield from _attention(config, f"{prefix}self_attn.")
    yield from _mixer(config, f"{prefix}mlp_hyper_connection.", injects=True)
    yield from _experts(config, f"{prefix}mlp.")


def _mixer(config: Qwen4ExpConfig, prefix: str, *, injects: bool) -> Iterator[TensorSpec]:
    """What reads the residual streams; injects: it also says how a result goes back to them."""
    wide, rank, matrix = config.stream_width, config.hc_lowrank, TensorKind.MATRIX
    yield _norm(f"{prefix}hc_norm.weight", wide)
    yield _spec(f"{prefix}input_mix_weight_down.weight", matrix, rank, wide)
    yield _spec(f"{prefix}input_mix_weight_up.weight", matrix, wide, rank)
    if injects:
        yield _spec(f"{prefix}block_inject_weight.weight", matrix, config.hc_count, wide)


def _ngram_embedding(config: Qwen4ExpConfig, module: int, prefix: str) -> Iterator[TensorSpec]:
    """One n-gram embedding: its hash as integers, its table in parts, its projections."""
    wide, width, spec = config.stream_width, config.ple_embed_dim, config.ngram(module)
    for name, values in (
        ("layer_multipliers", spec.multipliers),
        ("ngram_heads_vocab_sizes", spec.primes),
        ("ngram_heads_offsets", spec.offsets),
    ):
        yield TensorSpec(
            name=f"{prefix}ple_embedding.{name}",
            shape=(len(values),),
            kind=TensorKind.TABLE,
            values=values,
        )
    yield from _shards(config, module, prefix)
    yield _spec(f"{prefix}key_proj.weight", TensorKind.MATRIX, wide, width)
    yield _spec(f"{prefix}value_proj.weight", TensorKind.MATRIX, config.hidden_size, width)
    for name in ("norm_key", "norm_query", "norm_conv"):
        yield _norm(f"{prefix}{name}.weight", wide)
    kernel = config.ple_conv_kernel
    yield _spec(f"{prefix}conv1d.weight", TensorKind.PARAMETER, wide, 1, kernel)


def _shards(config: Qwen4ExpConfig, module: int, prefix: str) -> Iterator[TensorSpec]:
    """Equal parts of the table; where rows do not divide, the last is shorter."""
    total, width = config.ngram_rows(module), config.ngram_head_dim
    rows = ceil(total / config.ngram_shards)
    for shard, first in enumerate(range(0, total, rows)):
        name = f"{prefix}ple_embedding.ngram_embedding.shard_{shard}.weight"
        yield _spec(name, TensorKind.NGRAM, min(rows, total - first), width)


def _linear_attention(config: Qwen4ExpConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, heads, matrix = config.hidden_size, config.linear_value_heads, TensorKind.MATRIX
    values, parameter = heads * config.linear_value_dim, TensorKind.PARAMETER
    yield _spec(f"{prefix}in_proj_qkv.weight", matrix, config.conv_channels, hidden)
    yield _spec(f"{prefix}in_proj_z.weight", matrix, values, hidden)
    yield _spec(f"{prefix}in_proj_b.weight", matrix, heads, hidden)
    yield _spec(f"{prefix}in_proj_a.weight", matrix, heads, hidden)
    kernel = config.linear_conv_kernel
    yield _spec(f"{prefix}conv1d.weight", parameter, config.conv_channels, 1, kernel)
    yield _spec(f"{prefix}A_log", parameter, heads)
    yield _spec(f"{prefix}dt_bias", parameter, heads)
    # The one norm of this family whose weight is stored as it is.
    yield _spec(f"{prefix}norm.weight", parameter, config.linear_value_dim)
    yield _spec(f"{prefix}out_proj.weight", matrix, hidden, values)


def _attention(config: Qwen4ExpConfig, prefix: str) -> Iterator[TensorSpec]:
    """Rows of q_proj: for each head its query, then its output gate. Indexer: queries, one key."""
    hidden, head, matrix = config.hidden_size, config.head_dim, TensorKind.MATRIX
    wide, narrow = config.num_heads * head, config.num_kv_heads * head
    index = config.index_head_dim
    yield _spec(f"{prefix}q_proj.weight", matrix, 2 * wide, hidden)
    yield _spec(f"{prefix}k_proj.weight", matrix, narrow, hidden)
    yield _spec(f"{prefix}v_proj.weight", matrix, narrow, hidden)
    yield _spec(f"{prefix}o_proj.weight", matrix, hidden, wide)
    yield _norm(f"{prefix}q_norm.weight", head)
    yield _norm(f"{prefix}k_norm.weight", head)
    rows = (config.index_heads + 1) * index
    yield _spec(f"{prefix}indexer.index_qk_proj.weight", matrix, rows, hidden)
    yield _norm(f"{prefix}indexer.q_layernorm.weight", index)
    yield _norm(f"{prefix}indexer.k_layernorm.weight", index)


def _experts(config: Qwen4ExpConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden = config.hidden_size
    yield _spec(f"{prefix}gate.weight", TensorKind.FLOAT_MATRIX, config.num_experts, hidden)
    for expert in range(config.num_experts):
        yield from _swiglu(
            f"{prefix}experts.{expert}.", TensorKind.EXPERT, config.expert_size, hidden
        )
    yield from _swiglu(
        f"{prefix}shared_expert.", TensorKind.MATRIX, config.shared_expert_size, hidden
    )
    yield _spec(f"{prefix}shared_expert_gate.weight", TensorKind.MATRIX, 1, hidden)


def _swiglu(prefix: str, kind: TensorKind, size: int, hidden: int) -> Iterator[TensorSpec]:
    yield _spec(f"{prefix}gate_proj.weight", kind, size, hidden)
    yield _spec(f"{prefix}up_proj.weight", kind, size, hidden)
    yield _spec(f"{prefix}down_proj.weight", kind, hidden, size)


_PREFIXES = ("model.", "language_model.")
_FUSED = re.compile(r"layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_SHARD = re.compile(r"(.+\.ngram_embedding)\.shard_\d+\.weight")
_LEFT_OUT = {"visual.": "vision tower", "mtp.": "MTP block"}


def canonical_name(source: str) -> str:
    """Our name of a tensor in a file: without `model.` or `model.language_model.`."""
    for prefix in _PREFIXES:
        source = source.removeprefix(prefix)
    return source


def scale_name(spec: TensorSpec) -> str:
    """Canonical name of a packed tensor's scales; all parts of an n-gram table share one."""
    shard = _SHARD.fullmatch(spec.name)
    return f"{spec.name}_scale_inv" if shard is None else f"{shard[1]}.weight_scale"


def fused_experts(config: Qwen4ExpConfig, name: str) -> Fused | None:
    """All experts of a layer in one tensor: gate rows, then up rows; or down. None for others."""
    match = _FUSED.fullmatch(name)
    if match is None:
        return None
    hidden, size = config.hidden_size, config.expert_size
    shape: Shape = (config.num_experts, hidden, size)
    layout = [("down", 0, hidden)]
    if match[2] == "gate_up_proj":
        shape = (config.num_experts, 2 * size, hidden)
        layout = [("gate", 0, size), ("up", size, size)]
    parts = tuple(
        FusedPart(
            name=expert_name(int(match[1]), expert, which),
            expert=expert,
            first_row=first,
            num_rows=rows,
        )
        for expert in range(config.num_experts)
        for which, first, rows in layout
    )
    return Fused(shape=shape, parts=parts)


def left_out_part(name: str) -> str | None:
    """The part of a release that a canonical name belongs to and the text model does not use."""
    parts = (part for prefix, part in _LEFT_OUT.items() if name.startswith(prefix))
    return next(parts, None)


def left_out_notes(sources: Iterable[str]) -> tuple[str, ...]:
    """One sentence for each part of a checkpoint, by its names, that is not built."""
    found = [left_out_part(canonical_name(source)) for source in sources]
    return tuple(
        f"the {part} ({found.count(part)} tensors) is left out: the text model does not use it"
        for part in _LEFT_OUT.values()
        if part in found
    )
