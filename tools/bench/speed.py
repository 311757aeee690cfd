"""Speed suites: turns between programs, medians of repetitions, ratios in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from cachegraph.tools.bench.workers import Timing, Worker

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One program at one context: medians over the repetitions.

    host_share: share of a decode step that is not the graph call; None for peers.
    """

    name: str
    context: int
    decode_per_second: float
    prefill_per_second: float
    host_share: float | None = None


def text_tokens(vocab_size: int, count: int) -> NDArray[np.int64]:
    """The same made-up token ids in every run."""
    return np.random.default_rng(7).integers(2, vocab_size, count)


def compare(
    workers: Mapping[str, Worker],
    *,
    vocab_size: int,
    context: int,
    block: int,
    repeats: int,
    report: Report,
) -> list[Speed]:
    """Read a text of `context` tokens, then decode `block` tokens, in turns; medians of `repeats`.

    Each repetition runs every program once, so that all see the same state of the machine.
    """
    tokens = text_tokens(vocab_size, context)
    reads: dict[str, list[Timing]] = {name: [] for name in workers}
    decodes: dict[str, list[Timing]] = {name: [] for name in workers}
    for repeat in range(repeats + 1):
        for name, worker in workers.items():
            report(f"context {context}, repetition {repeat} of {repeats}: {name}")
            read, decode = worker.prefill(0, tokens), worker.decode(0, block)
            if repeat:  # the first warms caches and thread pools up
                reads[name].append(read)
                decodes[name].append(decode)
    return [
        Speed(
            name=name,
            context=context,
            decode_per_second=block / median(t.seconds for t in decodes[name]),
            prefill_per_second=context / median(t.seconds for t in reads[name]),
            host_share=_host_share(decodes[name]),
        )
        for name in workers
    ]


def context_ratio(
    worker: Worker,
    *,
    vocab_size: int,
    contexts: Sequence[int],
    block: int,
    repeats: int,
    report: Report,
) -> dict[int, float]:
    """Median milliseconds of a decode step at each context, sequences of one bundle in turns."""
    for seq_id, context in enumerate(contexts):
        report(f"reading {context} tokens")
        worker.prefill(seq_id, text_tokens(vocab_size, context))
    seconds: dict[int, list[float]] = {context: [] for context in contexts}
    for repeat in range(repeats + 1):
        for seq_id, context in enumerate(contexts):
            timing = worker.decode(seq_id, block)
            if repeat:
                seconds[context].append(timing.seconds)
    return {context: 1e3 * median(values) / block for context, values in seconds.items()}


def _host_share(timings: Sequence[Timing]) -> float | None:
    if not any(t.host_seconds for t in timings):
        return None
    return median(t.host_seconds / t.seconds for t in timings)
