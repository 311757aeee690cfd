"""The parts of the DeepSeek-V4 twin: numpy float64 functions, written from the equations.

Each does one piece of one layer for one whole sequence that starts at position 0. T tokens,
D hidden, M streams, H heads, K chosen. Shares nothing with the builder or the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, inf, log, pi, sqrt

import numpy as np

from cachegraph.models.deepseek_v4.config import DeepseekV4Config, Rope
from cachegraph.models.twin_tools import (
    Choice,
    Floats,
    Ids,
    Tensors,
    choose,
    rms_norm,
    sigmoid,
    softmax,
)


def inverse_frequencies(rope: Rope, width: int) -> Floats:
    """Radians per position of each channel pair [width / 2].

    YaRN divides slow pairs by `factor`, leaves fast ones, and blends between. The two corners
    are the pairs that turn beta_fast and beta_slow times over the original context.
    """
    pair = np.arange(width // 2)
    plain = rope.theta ** (-2.0 * pair / width)
    if rope.factor == 1.0:
        return np.asarray(plain)

    def pair_with(turns: float) -> float:
        return width * log(rope.original_context / (turns * 2 * pi)) / (2 * log(rope.theta))

    low = max(floor(pair_with(rope.beta_fast)), 0)
    high = min(ceil(pair_with(rope.beta_slow)), width - 1)
    slow = np.clip((pair - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return np.asarray(plain * (1 - slow) + plain / rope.factor * slow)


def rotate(x: Floats, angles: Floats) -> Floats:
    """Turn the last channels of x [T, ..., W], as adjacent pairs, by angles [T, pairs]."""
    pairs = angles.shape[-1]
    angles = angles.reshape(len(angles), *(1,) * (x.ndim - 2), pairs)
    start = x.shape[-1] - 2 * pairs
    turned = (x[..., start::2] + 1j * x[..., start + 1 :: 2]) * np.exp(1j * angles)
    out = x.copy()
    out[..., start::2] = turned.real
    out[..., start + 1 :: 2] = turned.imag
    return out


def sinkhorn(comb: Floats, iterations: int, eps: float) -> Floats:
    """Towards doubly stochastic [T, source, destination]: softmax rows, then alternate.

    The first pass is over columns only and columns come last, so they are the nearer to 1.
    """
    comb = softmax(comb, axis=-1) + eps
    for iteration in range(iterations):
        if iteration > 0:
            comb = comb / (comb.sum(axis=-1, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    return comb


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperWeights:
    """One hyper-connection: pre [T, M] into the site, post [T, M] out, comb [T, from, to]."""

    pre: Floats
    post: Floats
    comb: Floats


def hyper_weights(
    config: DeepseekV4Config, tensors: Tensors, site: str, streams: Floats
) -> HyperWeights:
    """The weights of site `hc_attn` or `hc_ffn` for streams [T, M, D]."""
    m = config.hc_mult
    scale, base = tensors.floats(f"{site}_scale"), tensors.floats(f"{site}_base")
    flat = rms_norm(streams.reshape(len(streams), -1), config.rms_norm_eps)
    mixes = flat @ tensors.floats(f"{site}_fn").T  # [T, M + M + M*M]
    scaled = mixes * np.repeat(scale, (m, m, m * m)) + base
    comb = scaled[:, 2 * m :].reshape(-1, m, m)
    return HyperWeights(
        pre=sigmoid(scaled[:, :m]) + config.hc_eps,
        post=2 * sigmoid(scaled[:, m : 2 * m]),
        comb=sinkhorn(comb, config.hc_sinkhorn_iters, config.hc_eps),
    )


def hyper_input(weights: HyperWeights, streams: Floats) -> Floats:
    """What the site sees: the streams [T, M, D] summed by pre, [T, D]."""
    return np.asarray(np.einsum("tm,tmd->td", weights.pre, streams))


def hyper_output(weights: HyperWeights, streams: Floats, out: Floats) -> Floats:
    """New streams [T, M, D]: the site's output [T, D] by post, the old streams by comb."""
    kept = np.einsum("tjk,tjd->tkd", weights.comb, streams)
    return np.asarray(weights.post[:, :, None] * out[:, None, :] + kept)


def hyper_head(config: DeepseekV4Config, tensors: Tensors, streams: Floats) -> Floats:
    """The final collapse of the streams [T, M, D] to [T, D]."""
    flat = rms_norm(streams.reshape(len(streams), -1), config.rms_norm_eps)
    mixes = flat @ tensors.floats("hc_head_fn").T
    scaled = mixes * tensors.floats("hc_head_scale") + tensors.floats("hc_head_base")
    return np.asarray(np.einsum("tm,tmd->td", sigmoid(scaled) + config.hc_eps, streams))


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorRun:
    """What one compressor computed.

    rows [T // ratio, width]: finished blocks after norm and RoPE. state_kv and state_score
    [T, width or 2*width]: each token's contribution as a state ring holds it, the position
    bias already in the score.
    """

    rows: Floats
    state_kv: Floats
    state_score: Floats


def compress(
    config: DeepseekV4Config, tensors: Tensors, x: Floats, *, ratio: int, overlaps: bool
) -> CompressorRun:
    """Pool x [T, D] into one row for each `ratio` tokens; an unfinished block gives none.

    With overlap a token has two halves of channels: the first counts in the next block, the
    second in its own. Block 0 has no previous one.
    """
    norm = tensors.floats("norm.weight")
    width, tokens = len(norm), np.arange(len(x))
    kv = tensors.linear(x, "wkv")
    score = tensors.linear(x, "wgate") + tensors.floats("ape")[tokens % ratio]
    pooled = np.zeros((len(x) // ratio, width))
    for block in range(len(pooled)):
        start = block * ratio
        own = slice(start, start + ratio)
        values, scores = kv[own, -width:], score[own, -width:]
        if overlaps and block > 0:
            before = slice(start - ratio, start)
            values = np.concatenate([kv[before, :width], values])
            scores = np.concatenate([score[before, :width], scores])
        pooled[block] = (softmax(scores, axis=0) * values).sum(axis=0)
    frequencies = inverse_frequencies(config.rope_compress, config.rope_head_dim)
    angles = np.outer(np.arange(len(pooled)) * ratio, frequencies)
    rows = rotate(rms_norm(pooled, config.rms_norm_eps, norm), angles)
    return CompressorRun(rows=rows, state_kv=kv, state_score=score)


def choose_blocks(
    config: DeepseekV4Config, tensors: Tensors, x: Floats, queries: Floats, keys: Floats
) -> list[Choice]:
    """The indexer: for each token the finished blocks it attends to.

    x [T, D], queries [T, q_lora_rank] after their norm, keys [blocks, index_head_dim]; the
    tensors are those under `attn.indexer`.
    """
    heads, width = config.index_heads, config.index_head_dim
    q = tensors.linear(queries, "wq_b").reshape(-1, heads, width)
    frequencies = inverse_frequencies(config.rope_compress, config.rope_head_dim)
    q = rotate(q, np.outer(np.arange(len(x)), frequencies))
    weights = tensors.linear(x, "weights_proj") / sqrt(heads * width)  # [T, heads]
    chosen = []
    for token in range(len(x)):
        visible = keys[: (token + 1) // config.csa_ratio]
        scores = weights[token] @ np.maximum(q[token] @ visible.T, 0.0)
        chosen.append(choose(scores, config.index_topk))
    return chosen


def attend(query: Floats, rows: Floats, sinks: Floats) -> Floats:
    """One token's heads [H, W] over rows [n, W] that are keys and values at once: [H, W].

    Each head's sink [H] takes part in the softmax and adds nothing.
    """
    scores = query @ rows.T / sqrt(query.shape[-1])
    weights = softmax(np.concatenate([scores, sinks[:, None]], axis=1), axis=1)
    return np.asarray(weights[:, :-1] @ rows)


def swiglu(config: DeepseekV4Config, tensors: Tensors, x: Floats) -> Floats:
    """One expert, [n, D] to [n, D]: gate clamped above, the other branch on both sides."""
    limit = config.swiglu_limit
    gate = np.minimum(tensors.linear(x, "w1"), limit)
    up = np.clip(tensors.linear(x, "w3"), -limit, limit)
    return tensors.linear(gate * sigmoid(gate) * up, "w2")


def route(
    config: DeepseekV4Config, tensors: Tensors, x: Floats, token_ids: Ids, *, is_hash: bool
) -> tuple[list[Choice], Floats]:
    """The experts of each token of x [T, D], and their weights [T, K].

    The bias takes part in choosing only. Tensors are those under `ffn`.
    """
    scores = np.sqrt(np.logaddexp(0.0, tensors.linear(x, "gate")))
    if is_hash:
        table = tensors.ids("gate.tid2eid")
        chosen = [Choice(ids=table[token], gap=inf) for token in token_ids]
    else:
        biased = scores + tensors.floats("gate.bias")
        chosen = [choose(row, config.experts_per_token) for row in biased]
    ids = np.stack([choice.ids for choice in chosen])
    picked = np.take_along_axis(scores, ids, axis=1)
    shares = picked / (picked.sum(axis=1, keepdims=True) + 1e-20)
    return chosen, np.asarray(shares * config.routed_scaling_factor)


def mix_experts(
    config: DeepseekV4Config, tensors: Tensors, x: Floats, ids: Ids, weights: Floats
) -> Floats:
    """The weighted routed experts and the shared one, [T, D]; tensors under `ffn`."""
    out = swiglu(config, tensors.under("shared_experts"), x)
    for expert in range(config.num_experts):
        tokens, places = np.nonzero(ids == expert)
        if len(tokens):
            result = swiglu(config, tensors.under(f"experts.{expert}"), x[tokens])
            # add.at, since a hash table may name one expert twice for a token
            np.add.at(out, tokens, weights[tokens, places, None] * result)
    return out
