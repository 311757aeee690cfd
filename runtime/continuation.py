"""One prompt and what follows it: options, the tokens so far, their text, and why it ends.

A step brings rows of logits for the newest token and for the drafts behind it; `settle` turns them
into events, the same that rows one by one would have given. Knows nothing of engines and batches.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.errors import ConfigError
from cachegraph.runtime.sampling import Choice, Logits, Sampler, SamplingOptions
from cachegraph.runtime.speculative import Draft
from cachegraph.runtime.text import StopMatcher, StreamDecoder

Finish = Literal["eos", "stop", "length", "context"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """How far and how to generate.

    max_tokens: new tokens per prompt. stop: strings that end a text and are cut off. ignore_eos:
    go on after the end-of-sequence token. draft: tokens drafted ahead in each step; greedy texts
    and the distribution of drawn ones are those of 0.
    """

    max_tokens: int = 128
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    draft: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, Integral) or self.max_tokens < 1:
            raise ConfigError(
                f"max_tokens is {self.max_tokens!r}; it must be a whole number of 1 or more"
            )
        if any(not text for text in self.stop):
            raise ConfigError("a stop string is empty; it would end every text at once")
        if not isinstance(self.draft, Integral) or self.draft < 0:
            raise ConfigError(
                f"draft is {self.draft!r}; it must be a whole number of 0 or more (0 is off)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCount:
    """What drafting did for one prompt.

    drafted: tokens that were drafted. accepted: those of them that the text took over. steps:
    decode calls after the prompt's own; each gave the accepted tokens and, unless the text ended
    with one of them, one more.
    """

    drafted: int
    accepted: int
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One new token of one prompt, or its end.

    text: what the token adds to the text; it may lag behind while a character or a possible stop
    string is incomplete. finish: set in a prompt's last event, why it ended. drafts: set there too,
    where tokens were to be drafted.
    """

    prompt: int
    choice: Choice
    text: str
    finish: Finish | None = None
    drafts: DraftCount | None = None


@dataclass(kw_only=True, slots=True)
class Continuation:
    """A prompt in a sequence.

    tokens: the prompt, what followed it and, until their step is settled, `drafts`. context: how
    many tokens a sequence holds. stream: None where there is no text.
    """

    prompt: int
    seq_id: int
    options: GenerateOptions
    eos_ids: Collection[int]
    context: int
    sampler: Sampler
    stream: StreamDecoder | None
    stops: StopMatcher
    tokens: list[int]
    drafts: list[Draft] = field(default_factory=list)
    _produced: int = 0
    _drafted: int = 0
    _accepted: int = 0
    _steps: int = 0

    @property
    def draft_room(self) -> int:
        """Tokens to draft now: one fewer than may still come, as the last takes no step."""
        left = min(
            self.options.max_tokens - self._produced - 1, self.context - len(self.tokens)
        )
        return min(self.options.draft, left)

    def propose(self, row: Logits) -> int:
        """The next drafted token, from its draft logits [vocab]."""
        draft = self.sampler.draft(row, self.tokens)
        self.drafts.append(draft)
        self.tokens.append(draft.token)
        return draft.token

    def settle(self, rows: NDArray[np.float32]) -> list[Event]:
        """What a step adds; `rows` [drafts + 1, vocab] are of the newest token and its drafts.

        There are fewer events than rows where a draft was replaced or the text has ended; the rows
        behind that are of tokens that never were.
        """
        drafts, self.drafts = self.drafts, []
        del self.tokens[len(self.tokens) - len(drafts) :]
        self._drafted += len(drafts)
        self._steps += self._produced > 0
        events: list[Event] = []
        for row, draft in zip(rows, (*drafts, None), strict=True):
            choice = self.sampler.sample(row, self.tokens, draft)
            is_accepted = draft is not None and draft.token == choice.token
            self._accepted += is_accepted
            events.append(self._take(choice))
            if events[-1].finish is not None or not is_accepted:
                break
        return events

    def _take(self, choice: Choice) -> Event:
        """Make a token the newest; its text, and whether the prompt ends with it."""
        self.tokens.append(choice.token)
        self._produced += 1
        finish = self._finish(choice.token)
        text = ""
        if self.stream is not None:
            if finish != "eos":
                text = self.stops.push(self.stream.push(choice.token))
            if self.stops.matched is not None:
                finish = "stop"
            elif finish is not None:
                text += self.stops.push(self.stream.finish()) + self.stops.finish()
        drafts = None
        if finish is not None and self.options.draft:
            drafts = DraftCount(
                drafted=self._drafted, accepted=self._accepted, steps=self._steps
            )
        return Event(
            prompt=self.prompt, choice=choice, text=text, finish=finish, drafts=drafts
        )

    def _finish(self, token: int) -> Finish | None:
        if token in self.eos_ids and not self.options.ignore_eos:
            return "eos"
        if self._produced == self.options.max_tokens:
            return "length"
        if len(self.tokens) > self.context:  # a step for the newest one has no room
            return "context"
        return None
