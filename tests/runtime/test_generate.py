"""Generation: how texts begin and end, which sequences they use; neighbours do not matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.bundles import Bundles
from support.engines import Engines, text, watched

from cachegraph.models.errors import (
    BatchError,
    CapacityError,
    ConfigError,
    LogitsError,
    StepError,
    UsageError,
)
from cachegraph.models.shipped import resolve
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.continuation import Event, GenerateOptions
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.generate import generate
from cachegraph.runtime.sampling import SamplingOptions
from cachegraph.runtime.text import TextCodec

EOS = 7
CONTEXT = 20
GREEDY_20 = GenerateOptions(max_tokens=20, ignore_eos=True)


class Scripted:
    """A decoder that follows a script: first token of a prompt -> the tokens that follow it."""

    def __init__(self, script: Mapping[int, Sequence[int]], *, sequences: int = 2) -> None:
        self.manifest: Any = SimpleNamespace(
            capacity=SimpleNamespace(context=CONTEXT), eos_token_ids=(EOS,), vocab_size=1024
        )
        self.num_sequences = sequences
        self.held: dict[int, list[int]] = {seq: [] for seq in range(sequences)}
        self.batches: list[Batch] = []
        self._script = script
        self._new: dict[int, int] = {}

    def length(self, seq_id: int) -> int:
        return len(self.held[seq_id])

    def clear(self, seq_id: int | None = None) -> None:
        for seq in self.held if seq_id is None else [seq_id]:
            self.held[seq] = []
            self._new.pop(seq, None)

    def decode(self, batch: Batch, progress: Any = None) -> np.ndarray:
        self.batches.append(batch)
        rows = []
        owners = [ids[0] for ids in batch.seq_ids]
        for token, position, seq, wanted in zip(
            batch.tokens, batch.positions, owners, batch.wants_logits, strict=True
        ):
            assert position == len(self.held[seq])
            self.held[seq].append(int(token))
            if wanted:
                rows.append(self._row(seq))
        if progress is not None:
            progress(len(batch), len(batch))
        return np.stack(rows)

    def _row(self, seq: int) -> np.ndarray:
        number = self._new[seq] = self._new.get(seq, -1) + 1
        row = np.zeros(1024, np.float32)
        token = self._script[self.held[seq][0]][number]
        if token < 0:
            return row - np.inf
        row[token] = 5
        return row


def run(
    decoder: Any, prompts: Sequence[Sequence[int]], *, codec: Any = None, **options: Any
) -> dict[int, list[Event]]:
    """The events of each prompt."""
    events: dict[int, list[Event]] = {number: [] for number in range(len(prompts))}
    for event in generate(decoder, prompts, GenerateOptions(**options), codec):
        events[event.prompt].append(event)
    return events


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [event.choice.token for event in events]


def finish_of(events: Sequence[Event]) -> str | None:
    assert all(event.finish is None for event in events[:-1])
    return events[-1].finish


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    return TextCodec.load(resolve("tiny:deepseek_v4"))


@pytest.mark.r0
def test_eos_ends_a_text_and_is_no_part_of_it(codec: TextCodec) -> None:
    words = codec.encode("def read", add_bos=False)
    decoder = Scripted({3: [*words, EOS, 9, 9]})
    (events,) = run(decoder, [[3, 4]], codec=codec).values()
    assert finish_of(events) == "eos"
    assert tokens_of(events) == [*words, EOS]
    assert "".join(event.text for event in events) == "def read"
    assert decoder.held == {0: [], 1: []}


@pytest.mark.r0
def test_eos_can_be_ignored() -> None:
    (events,) = run(
        Scripted({3: [EOS, 5, EOS, 6]}), [[3]], ignore_eos=True, max_tokens=4
    ).values()
    assert tokens_of(events) == [EOS, 5, EOS, 6]
    assert finish_of(events) == "length"


@pytest.mark.r0
@pytest.mark.parametrize("count", [1, 2, 5])
def test_length_counts_new_tokens(count: int) -> None:
    (events,) = run(Scripted({3: [8] * 9}), [[3, 1, 2]], max_tokens=count).values()
    assert tokens_of(events) == [8] * count
    assert finish_of(events) == "length"


@pytest.mark.r0
@pytest.mark.parametrize("prompt", [CONTEXT, CONTEXT - 1, CONTEXT - 3])
def test_the_context_ends_a_text(prompt: int) -> None:
    """A token more than the cache holds: the last one is sampled, never fed."""
    decoder = Scripted({3: [8] * 9})
    (events,) = run(decoder, [[3] * prompt]).values()
    assert finish_of(events) == "context"
    assert len(events) == CONTEXT - prompt + 1
    assert max(int(b.positions[-1]) for b in decoder.batches) == CONTEXT - 1


@pytest.mark.r0
@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        ("read(", "def "),
        ("f r", "de"),
        ("):", "def read(self, size"),
        ("def read(self, size):", ""),
        ("never", "def read(self, size): pass"),
        ("pass!", "def read(self, size): pass"),  # held back until the text ends
    ],
)
def test_a_stop_string_across_tokens_ends_a_text(
    codec: TextCodec, stop: str, kept: str
) -> None:
    words = codec.encode("def read(self, size): pass", add_bos=False)
    decoder = Scripted({3: [*words, EOS]})
    (events,) = run(decoder, [[3]], codec=codec, stop=(stop, "unheard of")).values()
    assert "".join(event.text for event in events) == kept
    assert finish_of(events) == ("eos" if stop in ("never", "pass!") else "stop")
    assert len(events) <= len(words) + 1
    assert decoder.held[0] == []


@pytest.mark.r0
def test_more_prompts_than_sequences_take_turns() -> None:
    script = {number: [number + 100] * number + [EOS] for number in range(10, 16)}
    decoder = Scripted(script, sequences=2)
    events = run(decoder, [[number] for number in script], max_tokens=30)
    for number, mine in zip(script, events.values(), strict=True):
        assert tokens_of(mine) == script[number]
        assert finish_of(mine) == "eos"
    assert max(len({ids[0] for ids in batch.seq_ids}) for batch in decoder.batches) == 2
    assert decoder.held == {0: [], 1: []}


@pytest.mark.r0
def test_sequences_in_use_are_left_alone() -> None:
    decoder = Scripted({3: [8] * 30}, sequences=3)
    decoder.held[0] = decoder.held[2] = [1, 2]
    (events,) = run(decoder, [[3]], max_tokens=3).values()
    assert len(events) == 3
    assert decoder.held == {0: [1, 2], 1: [], 2: [1, 2]}
    decoder.held[1] = [5]
    with pytest.raises(UsageError, match="no sequence is free"):
        generate(decoder, [[3]], GenerateOptions())  # type: ignore[arg-type]


@pytest.mark.r0
def test_two_generators_at_once_use_sequences_of_their_own() -> None:
    """Both were made before either ran."""
    decoder: Any = Scripted({3: [8] * 30, 4: [9] * 30}, sequences=2)
    first, second = (
        generate(decoder, [[token]], GenerateOptions(max_tokens=6)) for token in (3, 4)
    )
    pairs = list(zip(first, second, strict=True))
    assert [(a.choice.token, b.choice.token) for a, b in pairs] == [(8, 9)] * 6
    assert decoder.held == {0: [], 1: []}


@pytest.mark.r0
def test_a_generator_that_finds_its_sequence_taken_says_so() -> None:
    decoder: Any = Scripted({3: [8] * 30, 4: [9] * 30}, sequences=1)
    first, second = (generate(decoder, [[token]], GenerateOptions()) for token in (3, 4))
    next(first)
    with pytest.raises(UsageError, match="no sequence is free"):
        next(second)
    assert next(first).choice.token == 8


@pytest.mark.r0
@pytest.mark.parametrize("end", ["close", "throw", "drop"])
def test_a_generator_left_early_frees_its_sequences(end: str) -> None:
    decoder: Any = Scripted({3: [8] * 30, 4: [9] * 30})
    events: Any = generate(decoder, [[3], [4]], GenerateOptions())
    assert len(list(islice(events, 5))) == 5
    assert all(decoder.held.values())
    if end == "close":
        events.close()
    elif end == "throw":
        with pytest.raises(KeyboardInterrupt):
            events.throw(KeyboardInterrupt)
    else:
        del events
    assert decoder.held == {0: [], 1: []}


@pytest.mark.r0
def test_a_row_without_a_token_is_an_error_and_frees_everything() -> None:
    """A59: all logits -inf."""
    decoder: Any = Scripted({3: [8, -1], 4: [9] * 9})
    events = generate(decoder, [[3], [4]], GenerateOptions())
    assert [next(events).choice.token, next(events).choice.token] == [8, 9]
    with pytest.raises(LogitsError):
        next(events)
    assert decoder.held == {0: [], 1: []}


@pytest.mark.r0
@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([[1], []], {}, BatchError, "prompt 1 has no tokens"),
        (
            [[1] * (CONTEXT + 1)],
            {},
            CapacityError,
            "prompt 0 has 21 tokens, the context holds 20",
        ),
        ([[1]], {"stop": ("x",)}, ConfigError, "stop strings need a tokenizer"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_the_first_token(
    prompts: list[list[int]], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    decoder: Any = Scripted({})
    with pytest.raises(error, match=message):
        generate(decoder, prompts, GenerateOptions(**options))
    assert decoder.batches == []


@pytest.mark.r0
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number of 1 or more"),
        ({"stop": ("a", "")}, "a stop string is empty"),
    ],
)
def test_odd_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerateOptions(**options)


@pytest.mark.r0
def test_no_prompts_give_no_events() -> None:
    decoder: Any = Scripted({}, sequences=1)
    decoder.held[0] = [1]
    assert list(generate(decoder, [], GenerateOptions())) == []


@pytest.mark.r0
def test_progress_is_of_prefills_only() -> None:
    seen: list[tuple[int, int]] = []
    decoder: Any = Scripted({3: [8] * 9, 4: [8] * 9, 5: [8] * 9})
    prompts = [[3, 1, 1], [4], [5, 1]]
    options = GenerateOptions(max_tokens=3)
    list(generate(decoder, prompts, options, progress=lambda *at: seen.append(at)))
    assert seen == [(4, 4), (2, 2)]


def by_hand(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens, one call each."""
    engine.clear()
    row, tokens = engine.append(prompt), []
    for _ in range(count):
        tokens.append(int(row.argmax()))
        row = engine.append(tokens[-1:])
    engine.clear()
    return tokens


PROMPTS = [text(seq, 0, size, 131) for seq, size in enumerate((5, 24, 1, 40, 9, 13))]


@pytest.mark.r2
def test_greedy_text_is_the_best_token_of_each_row(engine: Engine) -> None:
    events = list(engine.generate([PROMPTS[1]], GREEDY_20))
    assert tokens_of(events) == by_hand(engine, PROMPTS[1], 20)


@pytest.mark.r2
def test_prompts_together_say_what_each_says_alone(engine: Engine) -> None:
    """Six prompts in four sequences: two start where others have ended."""
    alone = [tokens_of(list(engine.generate([prompt], GREEDY_20))) for prompt in PROMPTS]
    together: dict[int, list[int]] = {number: [] for number in range(len(PROMPTS))}
    for event in engine.generate(PROMPTS, GREEDY_20):
        together[event.prompt].append(event.choice.token)
    assert list(together.values()) == alone
    assert [engine.length(seq) for seq in range(4)] == [0, 0, 0, 0]


@pytest.mark.r2
def test_a_seed_fixes_the_text(engine: Engine) -> None:
    def sample(seed: int) -> list[int]:
        sampling = SamplingOptions(temperature=1.5, top_p=0.95, seed=seed)
        options = GenerateOptions(max_tokens=20, sampling=sampling, ignore_eos=True)
        return tokens_of(list(engine.generate(PROMPTS[:2], options)))

    assert sample(5) == sample(5)
    assert sample(5) != sample(6)


@pytest.mark.r2
def test_logprobs_are_those_of_the_rows(engine: Engine) -> None:
    row = engine.append(PROMPTS[0]).astype(np.float64)
    engine.clear()
    options = GenerateOptions(max_tokens=1, sampling=SamplingOptions(logprobs=3))
    (event,) = engine.generate([PROMPTS[0]], options)
    logprobs = row - np.log(np.exp(row).sum())
    best = np.argsort(-row)[:3]
    assert event.choice.logprob == pytest.approx(logprobs[best[0]], abs=1e-5)
    assert [entry[0] for entry in event.choice.top] == best.tolist()


@pytest.mark.r2
def test_a_call_that_fails_while_generating_frees_the_sequences(engine: Engine) -> None:
    engine.append([1, 2, 3], 3)
    events = engine.generate(PROMPTS[:2], GREEDY_20)
    next(events)

    def fail(call: Any) -> None:
        raise RuntimeError("broke")

    with watched(engine, before=fail), pytest.raises(StepError, match="broke"):
        list(events)
    assert [engine.length(seq) for seq in range(4)] == [0, 0, 0, 3]


@pytest.mark.r2
def test_an_interrupted_prefill_frees_its_sequence(engine: Engine) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(engine.generate([PROMPTS[3]], GREEDY_20, stop))
    assert engine.length(0) == 0


@pytest.mark.r2
def test_text_needs_a_tokenizer(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="this bundle has no tokenizer; give token ids"):
        engine.generate("hello")


@pytest.mark.r2
def test_texts_stream_to_what_their_tokens_decode_to(bundles: Bundles) -> None:
    bundle = bundles.bundle("tiny:deepseek_v4")
    with Engine.load(bundle, device="cpu", threads=1, spinning=False) as engine:
        assert engine.codec is not None
        texts = ["def read(self, size=-1):", "import os\n"]
        events = list(engine.generate(texts, GenerateOptions(max_tokens=24)))
        for number in range(2):
            mine = [event for event in events if event.prompt == number]
            ids = [t for t in tokens_of(mine) if t not in engine.manifest.eos_token_ids]
            assert "".join(event.text for event in mine) == engine.codec.decode(ids)
        assert tokens_of(list(engine.generate(texts[0], GenerateOptions(max_tokens=24)))) == [
            event.choice.token for event in events if event.prompt == 0
        ]


@pytest.mark.r2
def test_the_context_ends_a_real_text(engines: Engines) -> None:
    engine = engines.get()
    prompt = text(0, 0, 97, engine.manifest.vocab_size)
    events = list(engine.generate([prompt], GenerateOptions(ignore_eos=True)))
    assert len(events) == 4
    assert finish_of(events) == "context"
