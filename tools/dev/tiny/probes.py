"""What training needs from inside the model: the indexer's own loss and the routers' load.

Top-k passes no gradient, so the indexer learns from its own loss: KL from the attention mass
on the compressed rows (all heads, no gradient) to the softmax of its scores. Its inputs are
detached, so that loss trains the indexer and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cachegraph.tools.dev.tiny.network import CSA, CSA_RATIO, modules_named

Hook = Callable[[nn.Module, Any, Any], None]


class TrainingProbes:
    """Forward hooks on one model, whose calls must ask for output_attentions (eager)."""

    def __init__(self, model: nn.Module) -> None:
        self._scores: dict[str, Tensor] = {}  # by layer: [B, T, N]
        self._attention: dict[str, Tensor] = {}  # by layer: [B, H, T, keys], compressed last
        self._chosen: dict[nn.Module, Tensor] = {}  # by router: [B*T, k]
        self._indexers = [m for _, m in modules_named(model, "DeepseekV4Indexer")]
        self._hooks = [
            scorer.register_forward_hook(_keep(self._scores, _layer(name)))
            for name, scorer in modules_named(model, "DeepseekV4IndexerScorer")
        ]
        self._hooks += [
            attention.register_forward_hook(_keep(self._attention, _layer(name), item=1))
            for name, attention in modules_named(model, "DeepseekV4Attention")
            if attention.layer_type == CSA
        ]
        self._hooks += [
            router.register_forward_hook(_keep(self._chosen, router, item=2))
            for _, router in modules_named(model, "DeepseekV4TopKRouter")
        ]
        self._hooks += [
            indexer.register_forward_pre_hook(_detach_inputs) for indexer in self._indexers
        ]

    def set_topk(self, topk: int) -> None:
        """How many blocks the indexers select from now on."""
        for indexer in self._indexers:
            setattr(indexer, "index_topk", topk)  # noqa: B010 - nn.Module types it as a Tensor

    def index_loss(self) -> Tensor:
        """The sum over CSA layers of the indexer's loss in the last forward pass, a scalar."""
        losses = [index_loss(mass, self._scores[at]) for at, mass in self._attention.items()]
        return torch.stack(losses).sum()

    def balance_loss(self) -> Tensor:
        """Nothing: the routers' biases even them out."""
        return torch.zeros(())

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def balance_routers(self, step: float) -> None:
        """Move each router's selection bias by `step` towards experts chosen too seldom."""
        for router, chosen in self._chosen.items():
            bias = router.e_score_correction_bias
            assert isinstance(bias, Tensor)
            load = torch.bincount(chosen.flatten(), minlength=len(bias)).float()
            bias += step * torch.sign(load.mean() - load)


def index_loss(attention: Tensor, scores: Tensor) -> Tensor:
    """Cross entropy of a CSA layer's attention over blocks against its indexer's scores.

    attention [B, H, T, keys] ends with N columns of compressed rows; scores [B, T, N]. The
    mean is over rows that see at least one block. The target has no gradient; its own
    entropy, a constant, is not taken off, so the value is the KL divergence plus that.
    """
    rows, blocks = scores.shape[1:]
    finished = (torch.arange(rows) + 1) // CSA_RATIO
    visible = torch.arange(blocks) < finished[:, None]  # [T, N]
    mass = attention[..., -blocks:].detach().sum(1)  # [B, H, T, N] -> [B, T, N]
    target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
    log_picked = scores.masked_fill(~visible, -1e9).log_softmax(-1)
    per_row = -(target * log_picked * visible).sum(-1)  # [B, T]
    return per_row[:, visible.any(-1)].mean()


def _keep(store: dict[Any, Tensor], key: object, item: int | None = None) -> Hook:
    def hook(_module: nn.Module, _args: object, output: Any) -> None:
        store[key] = output if item is None else output[item]

    return hook


def _detach_inputs(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, queries, *rest = args
    return (hidden.detach(), queries.detach(), *rest)


def _layer(module_name: str) -> str:
    return module_name.split(".self_attn")[0]
