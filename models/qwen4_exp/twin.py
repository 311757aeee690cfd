"""The naive twin: Qwen4-Exp in plain numpy float64, the whole text at once, no caches.

It owns the order of a layer and the record of a run: logits, what every cache would hold, what was
chosen and how narrowly. The equations of the parts are in `twin_parts.py`. It knows nothing of
plans, graphs or checkpoints on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachegraph.models.qwen4_exp.config import LayerKind, Qwen4ExpConfig
from cachegraph.models.qwen4_exp.tensors import ngram_shards
from cachegraph.models.qwen4_exp.twin_parts import (
    attend,
    causal_conv,
    centred_norm,
    choose_pools,
    delta_inputs,
    delta_rule,
    gate_activation,
    mix_experts,
    ngram_gate,
    ngram_ids,
    read_streams,
    rotary_angles,
    rotate_halves,
    route,
    seen_tokens,
    silu,
    stream_norm,
    write_streams,
)
from cachegraph.models.twin_tools import Floats, Ids, Tensors, rms_norm, sigmoid


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramRun:
    """One n-gram embedding.

    out [T, S, D]. ids [T, heads]: table rows. conv_inputs [T, S*D]: what the convolution reads, the
    normed gated values; the last `ngram_history` of them are its history.
    """

    out: Floats
    ids: Ids
    conv_inputs: Floats

    def history(self, config: Qwen4ExpConfig, length: int) -> Floats:
        """The convolution's history after so many tokens [ngram_history, S*D], oldest first."""
        return _history(self.conv_inputs, length, config.ngram_history)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRun:
    """One gated delta layer.

    out [T, D]. conv_inputs [T, C]: queries, keys and values before the convolution; the last
    `conv_history` of them are its history. states [T, H, dk, dv]: after each token.
    """

    out: Floats
    conv_inputs: Floats
    states: Floats

    def history(self, config: Qwen4ExpConfig, length: int) -> Floats:
        """The convolution's history after so many tokens [conv_history, C], oldest first."""
        return _history(self.conv_inputs, length, config.conv_history)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRun:
    """One attention layer.

    out [T, D]. keys, values [T, KV, W]: keys after norm and RoPE. index_keys [T, index width]: the
    indexer's own, as projected. pooled [T // ratio, index width]: of complete pools, after norm and
    RoPE. pools: for each token those it attended to, best first. tokens: for each token those it
    attended to, ascending. index_gap [T]: infinite where no pool was left out.
    """

    out: Floats
    keys: Floats
    values: Floats
    index_keys: Floats
    pooled: Floats
    pools: tuple[Ids, ...]
    tokens: tuple[Ids, ...]
    index_gap: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRun:
    """One layer: its mixer of tokens, the experts [T, K] of each token, and the router's gap [T].

    ngram: None in layers without an n-gram embedding. A gap is the least chosen score minus the
    greatest left out; infinite where nothing was.
    """

    kind: LayerKind
    mixer: DeltaRun | AttentionRun
    ngram: NgramRun | None
    experts: Ids
    router_gap: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinRun:
    """A whole run: logits [T, vocab], the last layer's streams [T, S, D], every layer's record.

    hidden [T, D]: what the head sees.
    """

    logits: Floats
    hidden: Floats
    streams: Floats
    layers: tuple[LayerRun, ...]

    @property
    def smallest_gap(self) -> float:
        """The narrowest cut of any top-k, indexer or router; infinite where none was."""
        gaps = [run.router_gap for run in self.layers]
        gaps += [x.mixer.index_gap for x in self.layers if isinstance(x.mixer, AttentionRun)]
        return float(np.concatenate(gaps).min())


def forward(
    config: Qwen4ExpConfig,
    weights: Mapping[str, npt.NDArray[np.generic]],
    tokens: Sequence[int] | Ids,
    positions: npt.NDArray[np.integer] | None = None,
) -> TwinRun:
    """Run one sequence of T token ids from its first.

    weights: float arrays by published name without prefix (`layers.0.linear_attn.A_log`), as they
    are stored: most norms less one. CheckpointError where one is missing. positions [T, 3]: t, y
    and x of each token; by default those of a text, from 0.
    """
    tensors = Tensors(weights)
    ids = np.asarray(tokens, dtype=np.int64)
    if positions is None:
        positions = np.repeat(np.arange(len(ids))[:, None], 3, axis=1)
    angles = rotary_angles(config, positions.astype(np.int64))
    embedded = tensors.floats("embed_tokens.weight")[ids]
    streams = np.repeat(embedded[:, None, :], config.hc_count, axis=1)  # [T, S, D]
    layers = []
    for layer in range(config.num_layers):
        streams, run = run_layer(config, tensors, layer, streams, ids, angles)
        layers.append(run)
    hidden = read_streams(config, tensors.under("hyper_connection_mixer"), streams).x
    logits = tensors.linear(hidden, "lm_head")
    return TwinRun(logits=logits, hidden=hidden, streams=streams, layers=tuple(layers))


def run_layer(
    config: Qwen4ExpConfig,
    weights: Tensors,
    layer: int,
    streams: Floats,
    token_ids: Ids,
    angles: Floats,
) -> tuple[Floats, LayerRun]:
    """One layer on streams [T, S, D], with the angles of `rotary_angles`; tensors of the model."""
    tensors, kind, ngram = weights.under(f"layers.{layer}"), config.layer_kinds[layer], None
    if layer in config.ple_layers:
        ngram = run_ngrams(config, weights, layer, streams, token_ids)
        streams = streams + ngram.out

    site = tensors.under("attn_hyper_connection")
    read = read_streams(config, site, streams)
    mixer: DeltaRun | AttentionRun
    if kind is LayerKind.GDN:
        mixer = run_delta(config, tensors.under("linear_attn"), read.x)
    else:
        mixer = run_attention(config, tensors.under("self_attn"), read.x, angles)
    streams = write_streams(config, site, streams, read, mixer.out)

    site, mlp = tensors.under("mlp_hyper_connection"), tensors.under("mlp")
    read = read_streams(config, site, streams)
    chosen, shares = route(config, mlp, read.x)
    experts = np.stack([choice.ids for choice in chosen])
    out = mix_experts(config, mlp, read.x, experts, shares)
    streams = write_streams(config, site, streams, read, out)

    gap = np.array([choice.gap for choice in chosen])
    run = LayerRun(kind=kind, mixer=mixer, ngram=ngram, experts=experts, router_gap=gap)
    return streams, run


def run_ngrams(
    config: Qwen4ExpConfig, weights: Tensors, layer: int, streams: Floats, token_ids: Ids
) -> NgramRun:
    """The n-gram embedding of one layer, from its streams [T, S, D]; tensors of the model."""
    tensors = weights.under(f"layers.{layer}.ple")
    ids = ngram_ids(config.ngram(config.ple_layers.index(layer)), token_ids)
    parts = [weights.floats(name) for name in ngram_shards(config, layer)]
    embedded = np.concatenate(parts)[ids].reshape(
        len(ids), -1
    )  # [T, heads, W] -> [T, heads*W]

    keys = tensors.linear(embedded, "key_proj").reshape(streams.shape)
    keys = stream_norm(config, keys, tensors.floats("norm_key.weight"))
    queries = stream_norm(config, streams, tensors.floats("norm_query.weight"))
    value = tensors.linear(embedded, "value_proj")[:, None, :]
    gated = ngram_gate(config, keys, queries) * value  # [T, S, D]

    normed = stream_norm(config, gated, tensors.floats("norm_conv.weight"))
    flat = normed.reshape(len(ids), -1)
    mixed = silu(causal_conv(flat, tensors.floats("conv1d.weight"), config.ngram_size))
    return NgramRun(out=gated + mixed.reshape(gated.shape), ids=ids, conv_inputs=flat)


def run_delta(config: Qwen4ExpConfig, tensors: Tensors, x: Floats) -> DeltaRun:
    """A gated delta layer on x [T, D]; tensors are those under `linear_attn`."""
    projected = tensors.linear(x, "in_proj_qkv")
    mixed = silu(causal_conv(projected, tensors.floats("conv1d.weight")))
    out, states = delta_rule(delta_inputs(config, tensors, x, mixed))
    normed = rms_norm(out, config.rms_norm_eps, tensors.floats("norm.weight"))
    gate = gate_activation(config, tensors.linear(x, "in_proj_z")).reshape(out.shape)
    flat = (normed * gate).reshape(len(x), -1)
    return DeltaRun(out=tensors.linear(flat, "out_proj"), conv_inputs=projected, states=states)


def run_attention(
    config: Qwen4ExpConfig, tensors: Tensors, x: Floats, angles: Floats
) -> AttentionRun:
    """An attention layer on x [T, D]; tensors are those under `self_attn`."""
    eps, num_tokens, width = config.rms_norm_eps, len(x), config.head_dim
    both = tensors.linear(x, "q_proj").reshape(num_tokens, config.num_heads, 2 * width)
    queries = centred_norm(both[..., :width], eps, tensors.floats("q_norm.weight"))
    queries = rotate_halves(queries, angles)
    shared = (num_tokens, config.num_kv_heads, width)
    keys = tensors.linear(x, "k_proj").reshape(shared)
    keys = rotate_halves(centred_norm(keys, eps, tensors.floats("k_norm.weight")), angles)
    values = tensors.linear(x, "v_proj").reshape(shared)

    index_queries, index_keys, pooled = _index(config, tensors.under("indexer"), x, angles)
    chosen = [choose_pools(config, index_queries[t], pooled, t) for t in range(num_tokens)]
    tokens = tuple(seen_tokens(config, choice, t) for t, choice in enumerate(chosen))
    mixed = np.zeros_like(queries)
    for token, seen in enumerate(tokens):
        mixed[token] = attend(queries[token], keys[seen], values[seen])
    gated = mixed * sigmoid(both[..., width:])
    return AttentionRun(
        out=tensors.linear(gated.reshape(num_tokens, -1), "o_proj"),
        keys=keys,
        values=values,
        index_keys=index_keys,
        pooled=pooled,
        pools=tuple(choice.ids for choice in chosen),
        tokens=tokens,
        index_gap=np.array([choice.gap for choice in chosen]),
    )


def _index(
    config: Qwen4ExpConfig, tensors: Tensors, x: Floats, angles: Floats
) -> tuple[Floats, Floats, Floats]:
    """The indexer's queries [T, H, W], raw keys [T, W] and pooled keys [T // ratio, W].

    A pool is `ratio` tokens that follow each other; its key turns as its first token does.
    """
    eps, width, ratio = config.rms_norm_eps, config.index_head_dim, config.index_ratio
    both = tensors.linear(x, "index_qk_proj").reshape(len(x), -1, width)
    queries = centred_norm(both[:, :-1], eps, tensors.floats("q_layernorm.weight"))
    raw = both[:, -1]
    whole = len(x) // ratio * ratio
    means = raw[:whole].reshape(-1, ratio, width).mean(axis=1)
    pooled = centred_norm(means, eps, tensors.floats("k_layernorm.weight"))
    return rotate_halves(queries, angles), raw, rotate_halves(pooled, angles[:whole:ratio])


def _history(inputs: Floats, length: int, kept: int) -> Floats:
    """The last `kept` rows before `length`, zeros in place of those before the first."""
    padded = np.concatenate([np.zeros((kept, inputs.shape[1])), inputs[:length]])
    return padded[len(padded) - kept :]
