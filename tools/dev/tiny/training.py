"""The training loop of a tiny model: one step, periodic evaluation, the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Protocol

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cachegraph.tools.dev.tiny.schedule import Budget, LogRow, Phase, Recipe
from cachegraph.tools.dev.tiny.tokens import Ids

_EVAL_SEED = 5  # the same held-out pieces at every evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Token streams [n] of both sides of the split, and held-out bytes per token."""

    train: Ids
    held_out: Ids
    bytes_per_token: float


class Probes(Protocol):
    """What training reads out of a model of one family, and sets in it."""

    def set_topk(self, topk: int) -> None:
        """Blocks that each token selects from now on."""

    def index_loss(self) -> Tensor:
        """The indexers' own loss in the last forward pass, a scalar."""

    def balance_loss(self) -> Tensor:
        """What routers that choose unevenly add to the loss, a scalar."""

    def balance_routers(self, step: float) -> None:
        """Move selection biases, where routers have them."""

    def close(self) -> None:
        """Leave the model as it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Of one training step: the model's, in nats per token, and its indexers'."""

    model: float
    index: float


def train(
    model: nn.Module,
    probes: Probes,
    data: Data,
    recipe: Recipe,
    budget: Budget,
    *,
    seed: int,
    say: Callable[[str], None],
) -> list[LogRow]:
    """Train in place until the budget is used; returns the log, whose last row is the end.

    probes: of this model, closed afterwards.
    """
    optimizer = optimizer_of(model, recipe)
    random = np.random.default_rng(seed)
    rows: list[LogRow] = []
    step, phase = 0, None
    while (progress := budget.progress(step)) < 1:
        if phase is not (now := recipe.phase(progress)):
            phase = now
            probes.set_topk(phase.topk)
            say(f"step {step}: phase {phase.name}, {phase.batch} x {phase.tokens} tokens")
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step, progress)
        losses = _step(model, probes, optimizer, _batch(data.train, phase, random), recipe)
        step += 1
        is_last = budget.progress(step) >= 1
        if step % recipe.eval_every == 0 or is_last:
            held_out = evaluate(model, data, recipe)
            rows.append(LogRow(step, round(budget.elapsed(), 2), losses.model, held_out))
        if step <= 3 or step % 25 == 0 or is_last:
            say(_line(step, losses, rows))
    probes.close()
    return rows


def _step(
    model: nn.Module,
    probes: Probes,
    optimizer: torch.optim.Optimizer,
    texts: Tensor,
    recipe: Recipe,
) -> Losses:
    """One optimizer step on texts [B, T+1]."""
    model.train()
    logits = model(texts[:, :-1], use_cache=False, output_attentions=True).logits
    model_loss = cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
    index_loss = probes.index_loss()
    optimizer.zero_grad()
    total = model_loss + recipe.index_loss_weight * index_loss + probes.balance_loss()
    torch.autograd.backward(total)
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
    optimizer.step()
    probes.balance_routers(recipe.router_bias_step)
    return Losses(model=float(model_loss.detach()), index=float(index_loss.detach()))


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, recipe: Recipe) -> float:
    """Bits per byte of random pieces of the held-out text, the same ones every time.

    A quick look, not a measurement: pieces may straddle files. `eval_tiny.py` scores whole
    files.
    """
    model.eval()
    random = np.random.default_rng(_EVAL_SEED)
    piece = Phase(
        name="eval", begins=0.0, tokens=recipe.eval_tokens, batch=recipe.eval_batch, topk=0
    )
    total = 0.0
    for _ in range(recipe.eval_batches):
        texts = _batch(data.held_out, piece, random)
        logits = model(texts[:, :-1], use_cache=False).logits
        total += float(cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten()))
    return total / recipe.eval_batches / log(2) / data.bytes_per_token


def _batch(stream: Ids, phase: Phase, random: Generator) -> Tensor:
    """Random pieces of a stream: int64 [batch, tokens + 1]."""
    starts = random.integers(0, len(stream) - phase.tokens, phase.batch)
    return torch.from_numpy(np.stack([stream[s : s + phase.tokens + 1] for s in starts]))


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW with decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=recipe.betas)


def _line(step: int, losses: Losses, rows: list[LogRow]) -> str:
    line = f"step {step}: loss {losses.model:.3f} nats/token, index loss {losses.index:.2f}"
    if rows and rows[-1].step == step:
        line += f", held out {rows[-1].held_out:.3f} bits/byte"
    return line
