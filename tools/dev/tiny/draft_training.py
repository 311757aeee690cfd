"""The training loop of the draft block, beside a main model that stays as it is.

The loss of each draft is the cross entropy against the main model's own distribution there, not
against the text: a draft is accepted for agreeing with the model, also where the model errs.
Half of every batch is text, the other half greedy text of the model itself, which is what
drafts are made for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from cachegraph.tools.dev.tiny.draft_block import DraftBlock, run_main, unroll
from cachegraph.tools.dev.tiny.probes import TrainingProbes
from cachegraph.tools.dev.tiny.schedule import Budget, Recipe
from cachegraph.tools.dev.tiny.tokens import BOS_ID, EOS_ID, Ids
from cachegraph.tools.dev.tiny.training import optimizer_of


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRecipe:
    """Everything that decides a run beside its seed and its budget."""

    drafts: int = 3
    tokens: int = 256
    batch: int = 8  # half of them the model's own
    prompt: int = 32
    own_texts: int = 768
    rates: Recipe = dataclasses.field(default_factory=Recipe)


class DraftRow(NamedTuple):
    """One line of the log: loss in nats per draft; share of drafts equal to the main model's."""

    step: int
    minutes: float
    loss: float
    equal: tuple[float, ...]


def train_block(
    block: DraftBlock,
    model: Any,
    stream: Ids,
    recipe: DraftRecipe,
    budget: Budget,
    *,
    seed: int,
    done: Callable[[DraftRow], None],
) -> None:
    """Train the block in place until the budget is used; `done` hears of every step."""
    random = np.random.default_rng(seed)
    own = own_texts(model, stream, recipe, random)
    optimizer, probes, step = optimizer_of(block, recipe.rates), TrainingProbes(block), 0
    block.train()
    while (progress := budget.progress(step)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = recipe.rates.rate(step, progress)
        texts = torch.cat(
            [
                _pieces(stream, recipe.batch - recipe.batch // 2, recipe.tokens, random),
                own[torch.from_numpy(random.integers(0, len(own), recipe.batch // 2))],
            ]
        )
        loss, equal = draft_loss(block, model, texts, recipe.drafts)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(block.parameters(), recipe.rates.max_grad_norm)
        optimizer.step()
        probes.balance_routers(recipe.rates.router_bias_step)
        step += 1
        done(DraftRow(step, round(budget.elapsed(), 2), float(loss.detach()), equal))


def draft_loss(
    block: DraftBlock, model: Any, texts: Tensor, drafts: int
) -> tuple[Tensor, tuple[float, ...]]:
    """The mean over drafts of their cross entropy, and how many equal the model's choice."""
    logits, streams = run_main(model, texts)
    losses, equal = [], []
    for draft, guessed in enumerate(unroll(block, model, texts, streams, drafts)):
        wanted = logits[:, 1 + draft :]
        losses.append(-(wanted.softmax(-1) * guessed.log_softmax(-1)).sum(-1).mean())
        equal.append(float((wanted.argmax(-1) == guessed.argmax(-1)).float().mean()))
    return torch.stack(losses).mean(), tuple(equal)


@torch.no_grad()
def own_texts(model: Any, stream: Ids, recipe: DraftRecipe, random: Generator) -> Tensor:
    """BOS, a piece of text and the model's greedy continuation: int64 [own_texts, tokens]."""
    done: list[Tensor] = []
    while (missing := recipe.own_texts - sum(map(len, done))) > 0:
        prompts = _pieces(stream, min(missing, 64), recipe.prompt, random)
        prompts[:, 0] = BOS_ID
        done.append(continued(model, prompts, recipe.tokens))
    return torch.cat(done)


@torch.no_grad()
def continued(model: Any, prompts: Tensor, tokens: int) -> Tensor:
    """Prompts [B, P] with the model's greedy text behind them, past any EOS: [B, tokens]."""
    texts: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_length=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=EOS_ID,
    )
    return texts


def _pieces(stream: Ids, count: int, tokens: int, random: Generator) -> Tensor:
    """Random pieces of a stream: int64 [count, tokens]."""
    starts = random.integers(0, len(stream) - tokens, count)
    return torch.from_numpy(np.stack([stream[start : start + tokens] for start in starts]))
