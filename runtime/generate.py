"""Text from prompts: samples each sequence's next token and streams what it adds.

Several prompts run together, each in a sequence of its own; when one ends, the next waiting prompt
takes its place. Knows the engine's public calls only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.errors import BatchError, CapacityError, ConfigError, UsageError
from cachegraph.models.manifest import Manifest
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.sampling import Choice, Sampler, SamplingOptions
from cachegraph.runtime.text import StopMatcher, StreamDecoder, TextCodec

Finish = Literal["eos", "stop", "length", "context"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """How far and how to generate.

    max_tokens: new tokens per prompt. stop: strings that end a text and are cut off. ignore_eos:
    go on after the end-of-sequence token.
    """

    max_tokens: int = 128
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, Integral) or self.max_tokens < 1:
            raise ConfigError(
                f"max_tokens is {self.max_tokens!r}; it must be a whole number of 1 or more"
            )
        if any(not text for text in self.stop):
            raise ConfigError("a stop string is empty; it would end every text at once")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One new token of one prompt, or its end.

    text: what the token adds to the text; it may lag behind while a character or a possible stop
    string is incomplete. finish: set in a prompt's last event, why it ended.
    """

    prompt: int
    choice: Choice
    text: str
    finish: Finish | None = None


class Decoder(Protocol):
    """What generation needs of an engine."""

    manifest: Manifest

    @property
    def num_sequences(self) -> int:
        """Sequences 0 to n-1 exist."""

    def length(self, seq_id: int) -> int:
        """Tokens that a sequence holds."""

    def clear(self, seq_id: int | None = None) -> None:
        """Forget a sequence."""

    def decode(self, batch: Batch, progress: Progress | None = None) -> NDArray[np.float32]:
        """A row of logits for each token that wants them, in the batch's order."""


@dataclass(kw_only=True, slots=True)
class _Run:
    """A prompt in a sequence."""

    prompt: int
    seq_id: int
    sampler: Sampler
    stream: StreamDecoder | None
    stops: StopMatcher
    history: list[int]
    produced: int = 0


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
    CapacityError for one that fills the context, UsageError where no sequence is free.
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
    running: list[_Run] = []
    try:
        while waiting or running:
            free = _free(engine, is_needed=not running) if waiting else []
            fresh = [
                _start(engine, waiting.popleft(), seq_id, prompts, options, codec)
                for seq_id in free[: len(waiting)]
            ]
            batch = _batch(engine, running, fresh)
            running += fresh
            logits = engine.decode(batch, progress if fresh else None)
            for run, row in zip(list(running), logits, strict=True):
                event = _advance(engine, run, row, options)
                if event.finish is not None:
                    running.remove(run)
                    engine.clear(run.seq_id)
                yield event
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


def _start(
    engine: Decoder,
    prompt: int,
    seq_id: int,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    codec: TextCodec | None,
) -> _Run:
    vocab = engine.manifest.vocab_size
    return _Run(
        prompt=prompt,
        seq_id=seq_id,
        sampler=Sampler(options.sampling, vocab, stream=prompt),
        stream=codec.stream() if codec is not None else None,
        stops=StopMatcher(options.stop),
        history=[int(token) for token in prompts[prompt]],
    )


def _batch(engine: Decoder, running: Sequence[_Run], fresh: Sequence[_Run]) -> Batch:
    """The newest token of every running prompt, then the whole of every fresh one."""
    tokens: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    wanted: list[bool] = []
    for run in (*running, *fresh):
        new = run.history if run.produced == 0 else run.history[-1:]
        start = engine.length(run.seq_id)
        tokens += new
        positions += range(start, start + len(new))
        owners += [run.seq_id] * len(new)
        wanted += [False] * (len(new) - 1) + [True]
    return Batch.of(tokens, positions, owners, logits=wanted)


def _advance(
    engine: Decoder, run: _Run, row: NDArray[np.float32], options: GenerateOptions
) -> Event:
    """Choose the next token of a run; its text, and whether the run ends with it."""
    choice = run.sampler.sample(row, run.history)
    run.history.append(choice.token)
    run.produced += 1
    finish = _finish(engine, run, choice.token, options)
    text = ""
    if run.stream is not None:
        if finish != "eos":
            text = run.stops.push(run.stream.push(choice.token))
        if run.stops.matched is not None:
            finish = "stop"
        elif finish is not None:
            text += run.stops.push(run.stream.finish()) + run.stops.finish()
    return Event(prompt=run.prompt, choice=choice, text=text, finish=finish)


def _finish(engine: Decoder, run: _Run, token: int, options: GenerateOptions) -> Finish | None:
    if token in engine.manifest.eos_token_ids and not options.ignore_eos:
        return "eos"
    if run.produced == options.max_tokens:
        return "length"
    if engine.length(run.seq_id) == engine.manifest.capacity.context:
        return "context"
    return None
