"""The naive twin: DeepSeek-V4 in plain numpy float64, the whole text at once, no caches.

It owns the order of a layer and the record of a run: logits, what every cache would hold, what
was chosen and how narrowly. The equations of the parts are in `twin_parts.py`. It knows
nothing of plans, graphs or checkpoints on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from cachegraph.models.contract import CacheKind
from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind
from cachegraph.models.deepseek_v4.twin_parts import (
    CompressorRun,
    attend,
    choose_blocks,
    compress,
    hyper_head,
    hyper_input,
    hyper_output,
    hyper_weights,
    inverse_frequencies,
    mix_experts,
    rotate,
    route,
)
from cachegraph.models.twin_tools import Choice, Floats, Ids, Tensors, rms_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRun:
    """One layer's attention.

    out [T, D]. raw [T, head_dim]: keys after norm and RoPE. compressors: by the kind of the
    cache that would hold their rows. blocks: for each token the compressed rows it attended
    to, best first where the indexer chose. index_gap [T]: infinite where nothing was left out.
    """

    out: Floats
    raw: Floats
    compressors: Mapping[CacheKind, CompressorRun]
    blocks: tuple[Ids, ...]
    index_gap: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRun:
    """One layer: its attention, the experts [T, K] of each token, and the router's gap [T].

    A gap is the least chosen score minus the greatest left out; infinite where nothing was.
    """

    kind: LayerKind
    attention: AttentionRun
    experts: Ids
    router_gap: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinRun:
    """A whole run: logits [T, vocab], the last layer's streams [T, M, D], every layer's record."""

    logits: Floats
    streams: Floats
    layers: tuple[LayerRun, ...]

    @property
    def smallest_gap(self) -> float:
        """The narrowest cut of any top-k, indexer or router; infinite where none was."""
        gaps = [np.concatenate([x.attention.index_gap, x.router_gap]) for x in self.layers]
        return float(np.concatenate(gaps).min())


def forward(
    config: DeepseekV4Config,
    weights: Mapping[str, npt.NDArray[np.generic]],
    tokens: Sequence[int] | Ids,
    pinned: int = 0,
) -> TwinRun:
    """Run one sequence of T token ids from position 0.

    weights: float arrays by published name without prefix (`layers.0.attn.wq_a.weight`), the
    token-to-expert tables integers. CheckpointError where one is missing. pinned: first positions
    that every later token sees; the published model has none.
    """
    tensors = Tensors(weights)
    ids = np.asarray(tokens, dtype=np.int64)
    embedded = tensors.floats("embed.weight")[ids]
    streams = np.repeat(embedded[:, None, :], config.hc_mult, axis=1)  # [T, M, D]
    layers = []
    for layer in range(config.num_layers):
        part = tensors.under(f"layers.{layer}")
        streams, run = run_layer(config, part, layer, streams, ids, pinned)
        layers.append(run)
    collapsed = hyper_head(config, tensors, streams)
    normed = rms_norm(collapsed, config.rms_norm_eps, tensors.floats("norm.weight"))
    logits = tensors.linear(normed, "head")
    return TwinRun(logits=logits, streams=streams, layers=tuple(layers))


def run_layer(
    config: DeepseekV4Config,
    tensors: Tensors,
    layer: int,
    streams: Floats,
    token_ids: Ids,
    pinned: int = 0,
) -> tuple[Floats, LayerRun]:
    """One layer on streams [T, M, D]; tensors are those under `layers.N`."""
    eps, kind = config.rms_norm_eps, config.layer_kinds[layer]

    site = hyper_weights(config, tensors, "hc_attn", streams)
    x = rms_norm(hyper_input(site, streams), eps, tensors.floats("attn_norm.weight"))
    attention = run_attention(config, tensors.under("attn"), kind, x, pinned)
    streams = hyper_output(site, streams, attention.out)

    site = hyper_weights(config, tensors, "hc_ffn", streams)
    x = rms_norm(hyper_input(site, streams), eps, tensors.floats("ffn_norm.weight"))
    ffn = tensors.under("ffn")
    chosen, shares = route(config, ffn, x, token_ids, is_hash=config.is_hash(layer))
    experts = np.stack([choice.ids for choice in chosen])
    streams = hyper_output(site, streams, mix_experts(config, ffn, x, experts, shares))

    gap = np.array([choice.gap for choice in chosen])
    return streams, LayerRun(kind=kind, attention=attention, experts=experts, router_gap=gap)


def run_attention(
    config: DeepseekV4Config, tensors: Tensors, kind: LayerKind, x: Floats, pinned: int = 0
) -> AttentionRun:
    """Attention of one layer on x [T, D]; tensors are those under `layers.N.attn`."""
    eps, num_tokens = config.rms_norm_eps, len(x)
    frequencies = inverse_frequencies(config.rope(kind), config.rope_head_dim)
    angles = np.outer(np.arange(num_tokens), frequencies)

    low_rank = rms_norm(tensors.linear(x, "wq_a"), eps, tensors.floats("q_norm.weight"))
    heads = tensors.linear(low_rank, "wq_b").reshape(num_tokens, config.num_heads, -1)
    queries = rotate(rms_norm(heads, eps), angles)  # [T, H, head_dim]
    kv_norm = tensors.floats("kv_norm.weight")
    raw = rotate(rms_norm(tensors.linear(x, "wkv"), eps, kv_norm), angles)

    compressors, chosen = _compressed(config, tensors, kind, x, low_rank)
    sinks = tensors.floats("attn_sink")
    mixed = np.zeros_like(queries)
    for token, choice in enumerate(chosen):
        seen = np.arange(token + 1)
        rows = raw[: token + 1][(seen < pinned) | (seen > token - config.sliding_window)]
        for source in (CacheKind.CSA, CacheKind.HCA):
            if source in compressors:
                rows = np.concatenate([rows, compressors[source].rows[choice.ids]])
        mixed[token] = attend(queries[token], rows, sinks)
    return AttentionRun(
        out=_project(config, tensors, rotate(mixed, -angles)),
        raw=raw,
        compressors=compressors,
        blocks=tuple(choice.ids for choice in chosen),
        index_gap=np.array([choice.gap for choice in chosen]),
    )


def _compressed(
    config: DeepseekV4Config, tensors: Tensors, kind: LayerKind, x: Floats, low_rank: Floats
) -> tuple[dict[CacheKind, CompressorRun], list[Choice]]:
    """The compressors of a layer kind, and the compressed rows that each token attends to."""
    ratio, own = config.ratio(kind), tensors.under("compressor")
    if kind is LayerKind.CSA:
        indexer = tensors.under("indexer")
        index = compress(config, indexer.under("compressor"), x, ratio=ratio, overlaps=True)
        main = compress(config, own, x, ratio=ratio, overlaps=True)
        chosen = choose_blocks(config, indexer, x, low_rank, index.rows)
        return {CacheKind.CSA: main, CacheKind.LID: index}, chosen
    if kind is LayerKind.HCA:
        main = compress(config, own, x, ratio=ratio, overlaps=False)
        visible = [np.arange((token + 1) // ratio) for token in range(len(x))]
        return {CacheKind.HCA: main}, [Choice(ids=ids, gap=inf) for ids in visible]
    return {}, [Choice(ids=np.arange(0), gap=inf) for _ in x]


def _project(config: DeepseekV4Config, tensors: Tensors, heads: Floats) -> Floats:
    """Heads [T, H, head_dim] to [T, D]: each group by its block of wo_a, then all by wo_b."""
    grouped = heads.reshape(len(heads), config.o_groups, -1)  # [T, G, H/G*head_dim]
    blocks = tensors.floats("wo_a.weight").reshape(config.o_groups, config.o_lora_rank, -1)
    narrow = np.einsum("tgi,gri->tgr", grouped, blocks)
    return tensors.linear(narrow.reshape(len(heads), -1), "wo_b")
