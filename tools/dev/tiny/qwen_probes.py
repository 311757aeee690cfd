"""What training reads out of a tiny Qwen4-Exp, and how its indexers select while it trains.

The published indexer goes through its queries one by one. Here the same selection is made for all
queries of a text at once; texts have no padding, so that the blocks of a text are its fours.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen4_exp import modeling_qwen4_exp

from cachegraph.tools.dev.tiny.network import modules_named

_BALANCE_WEIGHT = 0.01
_turned: Any = modeling_qwen4_exp.apply_rotary_pos_emb


class QwenProbes:
    """Selection, index loss and router balance of every layer."""

    def __init__(self, model: nn.Module) -> None:
        self._indexers: list[Any] = [
            m for _, m in modules_named(model, "Qwen4ExpTextQSAIndexer")
        ]
        for indexer in self._indexers:
            indexer.forward = partial(_select, indexer)
        self._masses: list[Tensor] = []
        self._routed: list[tuple[Tensor, Tensor]] = []
        layers = [m for _, m in modules_named(model, "Qwen4ExpTextAttention")]
        routers = [m for _, m in modules_named(model, "Qwen4ExpTextTopKRouter")]
        self._hooks = [layer.register_forward_hook(self._note_attention) for layer in layers]
        self._hooks += [router.register_forward_hook(self._note_router) for router in routers]

    def close(self) -> None:
        """Leave the model as it was, with the published selection."""
        for hook in self._hooks:
            hook.remove()
        for indexer in self._indexers:
            del indexer.forward, indexer.noted_scores

    def set_topk(self, topk: int) -> None:
        """Blocks that each token keeps."""
        for indexer in self._indexers:
            indexer.block_topk = topk

    def index_loss(self) -> Tensor:
        """Mean KL divergence from the attention mass on blocks to the softmax of their scores."""
        losses = []
        for indexer, weights in zip(self._indexers, self._masses, strict=True):
            scores: Tensor = indexer.noted_scores
            ratio: int = indexer.compress_ratio
            blocks = scores.shape[-1]
            visible = scores > -math.inf
            mass = weights.detach().sum(1)[..., : blocks * ratio]
            mass = mass.reshape(*mass.shape[:-1], blocks, ratio).sum(-1) * visible
            total = mass.sum(-1, keepdim=True)
            known = total[..., 0] > 1e-6
            share = mass / total.clamp_min(1e-6)
            log_picked = scores.masked_fill(~visible, -1e9).log_softmax(-1)
            entropy = (share * share.clamp_min(1e-12).log()).sum(-1)
            losses.append(((entropy - (share * log_picked).sum(-1)) * known).mean())
        self._masses = []
        return torch.stack(losses).mean()

    def balance_routers(self, step: float) -> None:
        """Nothing: these routers have no bias to move; `balance_loss` evens them out."""

    def balance_loss(self) -> Tensor:
        """How unevenly routers choose: experts times the sum of (share chosen, mean weight)."""
        losses = []
        for logits, chosen in self._routed:
            experts = logits.shape[-1]
            counts = torch.bincount(chosen.flatten(), minlength=experts).float()
            weights = logits.softmax(-1).mean(0)
            losses.append(experts * (counts / counts.sum() * weights).sum())
        self._routed = []
        return _BALANCE_WEIGHT * torch.stack(losses).mean()

    def _note_attention(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training:
            self._masses.append(output[1])

    def _note_router(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training:
            self._routed.append((output[0], output[2]))


def _select(
    indexer: Any, hidden: Tensor, position_embeddings: Any, attention_mask: Tensor, cache: Any
) -> Tensor:
    """Tokens that each token selects: bool [B, 1, T, T]. Notes the scores of blocks [B, T, n]."""
    heads, width, ratio = indexer.index_n_heads, indexer.index_head_dim, indexer.compress_ratio
    cos, sin = position_embeddings
    count = hidden.shape[1]
    blocks = count // ratio
    projected = indexer.index_qk_proj(hidden.detach())
    q, raw = projected.split([heads * width, width], dim=-1)
    q = indexer.q_layernorm(q.unflatten(-1, (heads, width)))
    q = _turned(q, cos=cos, sin=sin, unsqueeze_dim=2)
    pooled = raw[:, : blocks * ratio].unflatten(1, (blocks, ratio)).mean(2)
    keys = _turned(
        indexer.k_layernorm(pooled)[:, :, None],
        cos=cos[:, : blocks * ratio : ratio],
        sin=sin[:, : blocks * ratio : ratio],
        unsqueeze_dim=2,
    )[:, :, 0]
    scores = torch.einsum("bthd,bnd->bthn", q, keys).relu().sum(2) / math.sqrt(width)
    places = torch.arange(count)
    ends = (torch.arange(blocks) + 1) * ratio
    visible = ends[None] <= places[:, None] + 1  # [T, n]
    scores = scores.masked_fill(~visible, -math.inf)
    indexer.noted_scores = scores
    picked = visible.expand(scores.shape)
    if indexer.block_topk < blocks:
        best = scores.topk(indexer.block_topk, dim=-1).indices
        picked = torch.zeros_like(picked).scatter(-1, best, True) & visible
    whole = (places + 1) // ratio * ratio
    tail = (places[None] >= whole[:, None]) & (places[None] <= places[:, None])
    mask: Tensor = tail.expand(scores.shape[0], -1, -1).clone()
    mask[..., : blocks * ratio] |= picked.repeat_interleave(ratio, dim=-1)
    return mask[:, None]
