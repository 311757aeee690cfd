"""Text from prompts: decodes, drafts where asked to, and streams what each step adds.

Several prompts run together, each in a sequence of its own; when one ends, the next waiting prompt
takes its place. A step without drafting is one with no drafts. Knows the engine's public calls
only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.errors import BatchError, CapacityError, ConfigError, UsageError
from cachegraph.models.manifest import Manifest
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.continuation import Continuation, Event, GenerateOptions
from cachegraph.runtime.sampling import Logits, Sampler
from cachegraph.runtime.text import StopMatcher, TextCodec

Progress = Callable[[int, int], None]


class Decoder(Protocol):
    """What generation needs of an engine."""

    manifest: Manifest

    @property
    def num_sequences(self) -> int:
        """Sequences 0 to n-1 exist."""

    @property
    def can_draft(self) -> bool:
        """Whether `draft` may be called."""

    def length(self, seq_id: int) -> int:
        """Tokens that a sequence holds."""

    def clear(self, seq_id: int | None = None) -> None:
        """Forget a sequence."""

    def decode(self, batch: Batch, progress: Progress | None = None) -> NDArray[np.float32]:
        """A row of logits for each token that wants them, in the batch's order."""

    def draft(
        self,
        pending: Mapping[int, int],
        count: int | Mapping[int, int],
        choose: Callable[[int, Logits], int],
    ) -> dict[int, list[int]]:
        """Up to `count` tokens behind each sequence and its token in `pending`.

        `choose` is called once for each of them, with the sequence and its draft logits [vocab].
        """

    def remove(self, seq_id: int, first: int, end: int = -1) -> None:
        """Take back the tokens of a sequence from position `first` on."""


def generate(
    engine: Decoder,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    codec: TextCodec | None = None,
    progress: Progress | None = None,
) -> Iterator[Event]:
    """Stream the tokens that follow each prompt (token ids).

    Without a codec the events carry no text, and stop strings are refused. `progress` gets tokens
    done and in all of each prefill. The sequences used are free ones, and are freed at the end,
    whatever ends it. Errors are raised before the first token: BatchError for an empty prompt,
    CapacityError for one that fills the context, ConfigError for drafts that the engine cannot
    make or take back, UsageError where no sequence is free.
    """
    _check(engine, prompts, options, codec)
    if prompts:
        _free(engine)
    return _stream(engine, prompts, options, codec, progress)


def _stream(
    engine: Decoder,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    codec: TextCodec | None,
    progress: Progress | None,
) -> Iterator[Event]:
    waiting = deque(range(len(prompts)))
    running: list[Continuation] = []
    try:
        while waiting or running:
            free = _free(engine, is_needed=not running) if waiting else []
            fresh = [
                _start(engine, waiting.popleft(), seq_id, prompts, options, codec)
                for seq_id in free[: len(waiting)]
            ]
            if options.draft:
                _draft(engine, running)
            running += fresh
            logits = engine.decode(_batch(engine, running), progress if fresh else None)
            ends = accumulate(1 + len(run.drafts) for run in running)
            rows = np.split(logits, list(ends)[:-1])
            for run, mine in zip(list(running), rows, strict=True):
                events = run.settle(mine)
                if events[-1].finish is not None:
                    running.remove(run)
                    engine.clear(run.seq_id)
                elif len(events) < len(mine):
                    engine.remove(run.seq_id, len(run.tokens) - 1)
                yield from events
    finally:
        with suppress(UsageError):  # an engine that was closed first holds nothing
            for run in running:
                engine.clear(run.seq_id)


def _free(engine: Decoder, is_needed: bool = True) -> list[int]:
    """Sequences that hold nothing, asked anew each time: the caller may use others meanwhile."""
    free = [seq for seq in range(engine.num_sequences) if engine.length(seq) == 0]
    if is_needed and not free:
        raise UsageError("no sequence is free; clear one, or export with more --sequences")
    return free


def _check(
    engine: Decoder,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    codec: TextCodec | None,
) -> None:
    if options.stop and codec is None:
        raise ConfigError("stop strings need a tokenizer; this bundle has none")
    context = engine.manifest.capacity.context
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise BatchError(f"prompt {number} has no tokens; there is nothing to continue")
        if len(prompt) > context:
            raise CapacityError(
                f"prompt {number} has {len(prompt)} tokens, the context holds {context}; shorten "
                "it or export with a larger --context"
            )
    if options.draft:
        _check_draft(engine, options.draft)


def _check_draft(engine: Decoder, count: int) -> None:
    if not engine.can_draft:
        raise ConfigError(
            f"draft is {count} and this engine cannot draft; export a checkpoint that has a draft "
            "block, and load the bundle with draft=True"
        )
    budget = engine.manifest.capacity.rewind
    if count > budget:
        raise ConfigError(
            f"draft is {count} and this bundle can take back {budget} tokens; draft fewer, or "
            "export with a larger --rewind"
        )


def _start(
    engine: Decoder,
    prompt: int,
    seq_id: int,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    codec: TextCodec | None,
) -> Continuation:
    manifest = engine.manifest
    return Continuation(
        prompt=prompt,
        seq_id=seq_id,
        options=options,
        eos_ids=manifest.eos_token_ids,
        context=manifest.capacity.context,
        sampler=Sampler(options.sampling, manifest.vocab_size, stream=prompt),
        stream=codec.stream() if codec is not None else None,
        stops=StopMatcher(options.stop),
        tokens=[int(token) for token in prompts[prompt]],
    )


def _draft(engine: Decoder, running: Sequence[Continuation]) -> None:
    """Draft for each running prompt as many tokens as it has room for."""
    drafting = {run.seq_id: run for run in running if run.draft_room > 0}
    if drafting:
        pending = {seq_id: run.tokens[-1] for seq_id, run in drafting.items()}
        counts = {seq_id: run.draft_room for seq_id, run in drafting.items()}
        engine.draft(pending, counts, lambda seq_id, row: drafting[seq_id].propose(row))


def _batch(engine: Decoder, runs: Sequence[Continuation]) -> Batch:
    """What no sequence holds yet: a newest token and its drafts, or the whole of a fresh prompt."""
    tokens: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    wanted: list[bool] = []
    for run in runs:
        start, end = engine.length(run.seq_id), len(run.tokens)
        tokens += run.tokens[start:]
        positions += range(start, end)
        owners += [run.seq_id] * (end - start)
        wanted += [place >= end - 1 - len(run.drafts) for place in range(start, end)]
    return Batch.of(tokens, positions, owners, logits=wanted)
