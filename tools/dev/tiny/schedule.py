"""The numbers of a training run: phases, learning rate, budget. Pure arithmetic, no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import cos, pi
from typing import NamedTuple

EVERYTHING = 1 << 30  # an index top-k that selects every block


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of training, named by its share of the budget at which it begins."""

    name: str
    begins: float
    tokens: int
    batch: int
    topk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides a run beside its seed and its budget.

    First attention sees every block while the indexer learns to imitate it; then top-k is on;
    then texts are long enough that top-k drops most blocks.
    """

    phases: tuple[Phase, ...] = (
        Phase(name="dense", begins=0.0, tokens=512, batch=6, topk=EVERYTHING),
        Phase(name="sparse", begins=0.45, tokens=512, batch=6, topk=16),
        Phase(name="long", begins=0.8, tokens=1024, batch=3, topk=16),
    )
    vocab_size: int = 1024
    peak_rate: float = 3e-3
    floor_share: float = 0.05
    warmup_steps: int = 60
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    index_loss_weight: float = 0.3
    router_bias_step: float = 0.002
    eval_every: int = 200
    eval_batches: int = 15
    eval_batch: int = 4
    eval_tokens: int = 512

    @classmethod
    def qwen4_exp(cls) -> Recipe:
        """That of the tiny Qwen4-Exp: shorter texts, since its recurrent layers are slower."""
        return cls(
            phases=(
                Phase(name="dense", begins=0.0, tokens=256, batch=8, topk=EVERYTHING),
                Phase(name="sparse", begins=0.5, tokens=384, batch=6, topk=16),
                Phase(name="long", begins=0.85, tokens=1024, batch=2, topk=16),
            ),
            eval_every=150,
            eval_batches=6,
        )

    def phase(self, progress: float) -> Phase:
        """The phase at a share of the budget, 0 <= progress."""
        return [phase for phase in self.phases if phase.begins <= progress][-1]

    def rate(self, step: int, progress: float) -> float:
        """Learning rate of a step (from 0): warm-up times a cosine down to the floor."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        cosine = 0.5 * (1 + cos(pi * progress))
        return self.peak_rate * warm * (cosine * (1 - self.floor_share) + self.floor_share)


class LogRow(NamedTuple):
    """One line of log.json: loss in nats per token, held-out text in bits per byte."""

    step: int
    minutes: float
    train_loss: float
    held_out: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How long to train: steps (reproducible) or minutes; exactly one is set."""

    steps: int | None = None
    minutes: float | None = None
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(f"set steps or minutes, not both: {self.steps}, {self.minutes}")

    def elapsed(self) -> float:
        """Minutes since the start."""
        return (time.monotonic() - self.started) / 60

    def progress(self, step: int) -> float:
        """Share of the budget used before this step; 1 or more means stop."""
        if self.steps is not None:
            return step / self.steps
        assert self.minutes is not None
        return self.elapsed() / self.minutes
