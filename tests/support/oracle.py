"""The independent framework that answers are compared with: transformers.

Owns loading (one model per folder, one torch thread) and two precisions: float32 as people run
it, and float64 throughout, for comparing equations rather than rounding. Knows nothing of
cachegraph.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file
from transformers import (
    DeepseekV4ForCausalLM,
    PreTrainedModel,
    Qwen4ExpForCausalLM,
    modeling_rope_utils,
)
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.models.qwen4_exp import modeling_qwen4_exp

# Two best logits nearer than this may swap between frameworks.
CLOSE_CALL = 1e-3

_MODELS = {"deepseek_v4": DeepseekV4ForCausalLM, "qwen4_exp_text": Qwen4ExpForCausalLM}

# Spellings of DeepSeek-V4 that transformers 5.24 writes and the published checkpoints do not have.
_RESPELLED = (
    ("embed_tokens.weight", "embed.weight"),
    ("hc_head.hc_", "hc_head_"),
    (".attn.norm.weight", ".attn.kv_norm.weight"),
)


Positions = npt.NDArray[np.integer]


def oracle_logits(
    folder: str | Path, tokens: Sequence[int], positions: Positions | None = None
) -> npt.NDArray[np.float32]:
    """Logits [T, vocab] of a whole text, float32, without a cache.

    positions [T, 3]: t, y and x of each token, for families that have them.
    """
    return _logits(_model(str(folder)), tokens, positions).float().numpy()


def oracle_logits64(
    folder: str | Path, tokens: Sequence[int], positions: Positions | None = None
) -> npt.NDArray[np.float64]:
    """The same with every weight, frequency and step in float64."""
    model = _model64(str(folder))
    with _double_precision():
        return _logits(model, tokens, positions).numpy()


def oracle_caches64(
    folder: str | Path, tokens: Sequence[int]
) -> list[dict[str, npt.NDArray[np.float64]]]:
    """What the framework's caches of DeepSeek-V4 hold after a whole text, float64, for each layer.

    raw: the last rows it keeps. compressor, indexer: finished rows. compressor_kv,
    compressor_gate and the same of the indexer: the tokens of the unfinished block, without
    position bias.
    """
    model = _model64(str(folder))
    with _double_precision(), torch.inference_mode():
        layers = model(torch.tensor([list(tokens)]), use_cache=True).cache.layers
    held = []
    for layer in layers:
        rows = {"raw": layer.keys[0, 0]}
        for name, compressed in getattr(layer, "compressed_kv", {}).items():
            rows[name] = compressed[0]
            rows[f"{name}_kv"] = layer.buffer_kv[name][0]
            rows[f"{name}_gate"] = layer.buffer_gate[name][0]
        held.append({name: tensor.numpy() for name, tensor in rows.items()})
    return held


def oracle_states64(
    folder: str | Path, tokens: Sequence[int], positions: Positions | None = None
) -> list[dict[str, npt.NDArray[np.float64]]]:
    """What the framework's caches of Qwen4-Exp hold after a whole text, float64, for each layer.

    Attention: keys and values [KV, T, W], index [T, W]. Gated delta layers: conv [channels,
    kernel], recurrent [H, dk, dv], and with an n-gram embedding ngram_conv [channels, history].
    """
    model = _model64(str(folder))
    with _double_precision(), torch.inference_mode():
        out = model(**_inputs(tokens, positions), use_cache=True)
    held = []
    for layer in out.cache.layers:
        if hasattr(layer, "keys"):
            rows = {"keys": layer.keys, "values": layer.values, "index": layer.indexer_keys}
        else:
            rows = {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}
            if layer.conv_states.get(1) is not None:
                rows["ngram_conv"] = layer.conv_states[1]
        held.append({name: tensor[0].numpy() for name, tensor in rows.items()})
    return held


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyText:
    """Greedy tokens up to the first close call, and the narrowest lead among them.

    `is_whole`: all tokens asked for are there; otherwise the next step was a close call.
    """

    tokens: tuple[int, ...]
    narrowest_lead: float
    is_whole: bool


def oracle_greedy(folder: str | Path, prompt_ids: Sequence[int], n: int) -> GreedyText:
    """n greedy tokens after a prompt, end-of-text tokens taken as any other.

    Drafted with the framework's cache, then proved by one run over the whole text without it:
    each token must be the best of its row. Ends early where that run's lead is below
    CLOSE_CALL.
    """
    model = _model(str(folder))
    text = [*prompt_ids, *_draft(model, prompt_ids, n)]
    rows = _logits(model, text)[len(prompt_ids) - 1 : -1]  # row i predicts new token i
    best = rows.topk(2, dim=-1)
    leads = (best.values[:, 0] - best.values[:, 1]).numpy()
    close = np.flatnonzero(leads < CLOSE_CALL)
    length = int(close[0]) if len(close) else n
    drafted = text[len(prompt_ids) :][:length]
    assert best.indices[:length, 0].tolist() == drafted, (
        "the framework's cache changed its answer"
    )
    lead = float(leads[:length].min(initial=np.inf))
    return GreedyText(tokens=tuple(drafted), narrowest_lead=lead, is_whole=length == n)


def published_weights(folder: str | Path) -> dict[str, npt.NDArray[Any]]:
    """Every tensor of an unquantised checkpoint by published name: float64, integers int64."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    respelled = _RESPELLED if _model_type(folder) == "deepseek_v4" else ()
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, array in load_file(path).items():
            kind = np.int64 if array.dtype.kind == "i" else np.float64
            name = name.removeprefix("model.")
            for written, published in respelled:
                name = name.replace(written, published)
            arrays[name] = array.astype(kind)
    return arrays


def _model_type(folder: str | Path) -> str:
    return json.loads((Path(folder) / "config.json").read_text("utf-8"))["model_type"]


@lru_cache(maxsize=8)
def _model(folder: str) -> PreTrainedModel:
    torch.set_num_threads(1)
    return (
        _MODELS[_model_type(folder)]
        .from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        .eval()
    )


@lru_cache(maxsize=8)
def _model64(folder: str) -> PreTrainedModel:
    with _double_precision():
        model = _model.__wrapped__(folder).double()
        for part in model.modules():
            if isinstance(part, modeling_deepseek_v4.DeepseekV4RotaryEmbedding):
                _recompute_frequencies(part)
            if isinstance(part, modeling_qwen4_exp.Qwen4ExpTextRotaryEmbedding):
                part.inv_freq.copy_(part.compute_default_rope_parameters(part.config)[0])
    return model


def _recompute_frequencies(rotary: Any) -> None:
    """The loader computed them in float32; call within _double_precision."""
    for label in rotary.layer_types:
        compute = rotary.compute_default_rope_parameters
        if rotary.rope_type[label] != "default":
            compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rotary.rope_type[label]]
        frequencies, _ = compute(rotary.config, layer_type=label)
        getattr(rotary, f"{label}_inv_freq").copy_(frequencies)


class _DoubleTorch:
    """Stands in for the name `torch` in a module: float32 means float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def _double_precision() -> Iterator[None]:
    """The model's code asks for float32 in norms, softmax and RoPE; here it gets float64."""
    with (
        mock.patch.object(modeling_deepseek_v4, "torch", _DoubleTorch()),
        mock.patch.object(modeling_qwen4_exp, "torch", _DoubleTorch()),
        mock.patch.object(modeling_rope_utils, "torch", _DoubleTorch()),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def _inputs(tokens: Sequence[int], positions: Positions | None) -> dict[str, torch.Tensor]:
    """One sequence as the model takes it; positions [T, 3] -> [3, 1, T]."""
    ids = {"input_ids": torch.tensor([list(tokens)])}
    if positions is None:
        return ids
    return {**ids, "position_ids": torch.tensor(positions.T[:, None, :])}


@torch.inference_mode()
def _logits(
    model: PreTrainedModel, tokens: Sequence[int], positions: Positions | None = None
) -> torch.Tensor:
    return model(**_inputs(tokens, positions), use_cache=False).logits[0]


@torch.inference_mode()
def _draft(model: PreTrainedModel, prompt_ids: Sequence[int], n: int) -> list[int]:
    drafted: list[int] = []
    feed, cache = list(prompt_ids), None
    for _ in range(n):
        out = model(torch.tensor([feed]), cache=cache, use_cache=True)
        cache = out.cache
        feed = [int(out.logits[0, -1].argmax())]
        drafted += feed
    return drafted
