"""The parts of the Qwen4-Exp twin: numpy float64 functions, written from the equations.

Each does one piece of one layer for one whole sequence that starts at its first token. T tokens,
D hidden, S residual streams, H heads, W head width. Shares nothing with the builder or the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from cachegraph.models.ngram_spec import NgramSpec
from cachegraph.models.qwen4_exp.config import GateActivation, Qwen4ExpConfig
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

_L2_EPS = 1e-6  # of queries and keys of the delta rule
_GATE_FLOOR = 1e-6  # of the gate of an n-gram embedding, before its root


def silu(x: Floats) -> Floats:
    """x * sigmoid(x)."""
    return np.asarray(x * sigmoid(x))


def centred_norm(x: Floats, eps: float, weight: Floats) -> Floats:
    """RMS norm on the last axis with a weight that is stored less one."""
    return rms_norm(x, eps, 1 + weight)


def stream_norm(config: Qwen4ExpConfig, x: Floats, weight: Floats) -> Floats:
    """Each stream of x [T, S, D] by itself, weight [S*D] less one."""
    return centred_norm(x, config.rms_norm_eps, weight.reshape(x.shape[1:]))


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRead:
    """What a site sees, x [T, D], and the streams it was read from, normed [T, S, D]."""

    x: Floats
    normed: Floats


def read_streams(config: Qwen4ExpConfig, tensors: Tensors, streams: Floats) -> StreamRead:
    """Residual streams [T, S, D] to one: the mean of the normed ones, each channel gated."""
    normed = stream_norm(config, streams, tensors.floats("hc_norm.weight"))
    flat = normed.reshape(len(normed), -1)
    low = silu(tensors.linear(flat, "input_mix_weight_down") / config.hc_count)
    gate = sigmoid(tensors.linear(low, "input_mix_weight_up")).reshape(normed.shape)
    return StreamRead(x=(gate * normed).mean(axis=1), normed=normed)


def write_streams(
    config: Qwen4ExpConfig, tensors: Tensors, streams: Floats, read: StreamRead, out: Floats
) -> Floats:
    """The streams [T, S, D] with a site's result [T, D] added, to each by a weight in (0, 2)."""
    flat = read.normed.reshape(len(out), -1)
    weights = 2 * sigmoid(tensors.linear(flat, "block_inject_weight") / config.hc_count)
    return np.asarray(streams + weights[:, :, None] * out[:, None, :])


def causal_conv(x: Floats, kernel: Floats, dilation: int = 1) -> Floats:
    """Depthwise over tokens, x [T, C], kernel [C, 1, K]; nothing stands before the first token.

    The last tap reads the token itself, each earlier one `dilation` tokens further back.
    """
    taps = kernel[:, 0, :].T  # [K, C]
    out = np.zeros_like(x)
    for tap, weight in enumerate(taps):
        back = (len(taps) - 1 - tap) * dilation
        if back < len(x):
            out[back:] += x[: len(x) - back] * weight
    return out


def ngram_context(spec: NgramSpec, tokens: Ids, position: int) -> list[int]:
    """The tokens of the n-grams that end at a position, newest first.

    Before the start, and from an end token back, all are end tokens; one at the position itself
    cuts nothing.
    """
    context = [int(tokens[position])]
    is_cut = False
    for back in range(1, spec.history + 1):
        is_cut = is_cut or position < back or int(tokens[position - back]) == spec.end
        context.append(spec.end if is_cut else int(tokens[position - back]))
    return context


def ngram_ids(spec: NgramSpec, tokens: Ids) -> Ids:
    """Table rows of each token [T, heads]: heads of 2-grams first."""
    rows = []
    for position in range(len(tokens)):
        context = ngram_context(spec, tokens, position)
        mixed, ids = context[0] * spec.multipliers[0], []
        for order in range(1, spec.history + 1):
            mixed ^= context[order] * spec.multipliers[order]
            first = (order - 1) * spec.heads_per_order
            for head in range(first, first + spec.heads_per_order):
                ids.append(mixed % spec.primes[head] + spec.offsets[head])
        rows.append(ids)
    return np.array(rows, np.int64)


def rotary_angles(config: Qwen4ExpConfig, positions: Ids) -> Floats:
    """Angles [T, rotary_dim / 2] of positions [T, 3] (t, y, x).

    Frequency i turns by y where i mod 3 is 1, by x where it is 2, as far as each one's section
    reaches, and by t otherwise.
    """
    half = config.rotary_dim // 2
    pair = np.arange(half)
    frequencies = config.rope_theta ** (-2.0 * pair / config.rotary_dim)
    axis = np.zeros(half, np.int64)
    for number in (1, 2):
        axis[number : 3 * config.mrope_section[number] : 3] = number
    return np.asarray(positions[:, axis] * frequencies)


def rotate_halves(x: Floats, angles: Floats) -> Floats:
    """Turn channels of x [T, ..., W], i together with i + half, by angles [T, half].

    Those from 2 * half on stay.
    """
    half = angles.shape[-1]
    angles = angles.reshape(len(angles), *(1,) * (x.ndim - 2), half)
    first, second = x[..., :half], x[..., half : 2 * half]
    out = x.copy()
    out[..., :half] = first * np.cos(angles) - second * np.sin(angles)
    out[..., half : 2 * half] = second * np.cos(angles) + first * np.sin(angles)
    return out


def _unit(x: Floats) -> Floats:
    return np.asarray(x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + _L2_EPS))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaInputs:
    """What the delta rule takes, by value head: q, k [T, H, dk], v [T, H, dv]; the rest [T, H]."""

    q: Floats
    k: Floats
    v: Floats
    decay: Floats
    beta: Floats


def delta_inputs(
    config: Qwen4ExpConfig, tensors: Tensors, x: Floats, mixed: Floats
) -> DeltaInputs:
    """From the layer's input x [T, D] and the convolved queries, keys and values mixed [T, C].

    A key head serves the value heads that follow each other.
    """
    keys = config.linear_key_heads * config.linear_key_dim
    q, k, v = np.split(mixed, [keys, 2 * keys], axis=1)
    shared = config.linear_value_heads // config.linear_key_heads
    q, k = (
        np.repeat(_unit(part.reshape(len(x), -1, config.linear_key_dim)), shared, axis=1)
        for part in (q, k)
    )
    slope = np.logaddexp(0.0, tensors.linear(x, "in_proj_a") + tensors.floats("dt_bias"))
    return DeltaInputs(
        q=q / sqrt(config.linear_key_dim),
        k=k,
        v=v.reshape(len(x), -1, config.linear_value_dim),
        decay=np.exp(-np.exp(tensors.floats("A_log")) * slope),
        beta=sigmoid(tensors.linear(x, "in_proj_b")),
    )


def delta_rule(inputs: DeltaInputs) -> tuple[Floats, Floats]:
    """Results [T, H, dv], and the state after each token [T, H, dk, dv], from a state of zeros."""
    num_tokens, heads, key_dim = inputs.k.shape
    states = np.zeros((num_tokens, heads, key_dim, inputs.v.shape[-1]))
    out = np.zeros_like(inputs.v)
    state = np.zeros(states.shape[1:])
    for token in range(num_tokens):
        key = inputs.k[token]
        state = state * inputs.decay[token][:, None, None]
        known = np.einsum("hkv,hk->hv", state, key)
        change = inputs.beta[token][:, None] * (inputs.v[token] - known)
        state = state + key[:, :, None] * change[:, None, :]
        states[token] = state
        out[token] = np.einsum("hkv,hk->hv", state, inputs.q[token])
    return out, states


def gate_activation(config: Qwen4ExpConfig, x: Floats) -> Floats:
    """The activation of a gated delta layer's output gate."""
    return silu(x) if config.output_gate is GateActivation.SILU else sigmoid(x)


def ngram_gate(config: Qwen4ExpConfig, keys: Floats, queries: Floats) -> Floats:
    """How much of an n-gram's value each stream takes [T, S, 1]; keys and queries [T, S, D]."""
    match = (keys * queries).sum(axis=-1, keepdims=True) / sqrt(config.hidden_size)
    return sigmoid(np.sign(match) * np.sqrt(np.maximum(np.abs(match), _GATE_FLOOR)))


def choose_pools(config: Qwen4ExpConfig, queries: Floats, keys: Floats, token: int) -> Choice:
    """The complete pools, by number, that a token attends to.

    queries [H, W] of that token, keys [pools, W] of the whole sequence. Its own pool is one of them
    where it completes it.
    """
    visible = keys[: (token + 1) // config.index_ratio]
    scores = np.maximum(queries @ visible.T, 0.0).sum(axis=0) / sqrt(queries.shape[-1])
    return choose(scores, config.top_pools)


def seen_tokens(config: Qwen4ExpConfig, choice: Choice, token: int) -> Ids:
    """The tokens of the chosen pools, ascending, and those after the last complete pool."""
    ratio = config.index_ratio
    members = np.sort(choice.ids)[:, None] * ratio + np.arange(ratio)
    tail = np.arange((token + 1) // ratio * ratio, token + 1)
    return np.concatenate([members.ravel(), tail]).astype(np.int64)


def attend(queries: Floats, keys: Floats, values: Floats) -> Floats:
    """One token's heads [H, W] over rows [n, KV, W]: [H, W]. H / KV heads in turn share one."""
    shared = len(queries) // keys.shape[1]
    keys, values = (np.repeat(rows, shared, axis=1) for rows in (keys, values))
    scores = np.einsum("hw,nhw->hn", queries, keys) / sqrt(queries.shape[-1])
    return np.asarray(np.einsum("hn,nhw->hw", softmax(scores, axis=1), values))


def swiglu(tensors: Tensors, x: Floats) -> Floats:
    """One expert, [n, D] to [n, D]."""
    return tensors.linear(
        silu(tensors.linear(x, "gate_proj")) * tensors.linear(x, "up_proj"), "down_proj"
    )


def route(config: Qwen4ExpConfig, tensors: Tensors, x: Floats) -> tuple[list[Choice], Floats]:
    """The experts of each token of x [T, D], and their weights [T, K]; tensors under `mlp`."""
    scores = softmax(tensors.linear(x, "gate"), axis=1)
    chosen = [choose(row, config.experts_per_token) for row in scores]
    shares = np.take_along_axis(scores, np.stack([each.ids for each in chosen]), axis=1)
    if config.norm_topk_prob:
        shares = shares / shares.sum(axis=1, keepdims=True)
    return chosen, np.asarray(shares)


def mix_experts(
    config: Qwen4ExpConfig, tensors: Tensors, x: Floats, ids: Ids, weights: Floats
) -> Floats:
    """The weighted routed experts and the gated shared one, [T, D]; tensors under `mlp`."""
    out = sigmoid(tensors.linear(x, "shared_expert_gate")) * swiglu(
        tensors.under("shared_expert"), x
    )
    for expert in range(config.num_experts):
        tokens, places = np.nonzero(ids == expert)
        if len(tokens):
            result = swiglu(tensors.under(f"experts.{expert}"), x[tokens])
            out[tokens] += weights[tokens, places, None] * result
    return out
