"""`cachegraph generate`: text that follows one prompt or several."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachegraph.models.errors import ConfigError
from cachegraph.tools.drafting import drafting_figures, drafting_line
from cachegraph.tools.engine_options import (
    BundleArgument,
    DeviceOption,
    DraftOption,
    SpinningOption,
    ThreadsOption,
    open_engine,
)
from cachegraph.tools.output import JsonFlag, note, print_json
from cachegraph.tools.progress import prefill_progress

if TYPE_CHECKING:
    from cachegraph.runtime import Engine, Event, GenerateOptions


PromptOption = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", help="Text to continue; several run in one batch."),
]
PromptFileOption = Annotated[
    list[Path] | None, typer.Option(help="File whose text is a prompt.")
]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="New tokens per prompt.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 is off.")]
TopPOption = Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")]
MinPOption = Annotated[
    float, typer.Option(help="Drop tokens below this share of the likeliest one.")
]
PenaltyOption = Annotated[float, typer.Option(help="Above 1 repeats less.")]
SeedOption = Annotated[int | None, typer.Option(help="Same seed, same text.")]
StopOption = Annotated[list[str] | None, typer.Option(help="Text that ends the answer.")]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(min=0, help="Also give log-probabilities of the n best (with --json)."),
]


def command(
    bundle: BundleArgument,
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    logprobs: LogprobsOption = None,
    draft: DraftOption = 0,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 0,
    spinning: SpinningOption = True,
    as_json: JsonFlag = False,
) -> None:
    """Generate text with a bundle, streaming it as it comes; speed goes to stderr.

    Ctrl-C ends it with what there is.

    Example: cachegraph generate out/tiny --prompt "import os" --max-tokens 64
    """
    texts = [*(prompt or []), *map(_read, prompt_file or [])]
    if not texts:
        raise ConfigError("nothing to continue; give --prompt TEXT or --prompt-file FILE")
    from cachegraph.runtime import GenerateOptions, SamplingOptions

    sampling = SamplingOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        logprobs=logprobs,
    )
    options = GenerateOptions(
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        sampling=sampling,
        draft=draft,
    )
    with open_engine(bundle, device, threads, spinning, draft=draft > 0) as engine:
        events, is_whole = _run(engine, texts, options, len(texts) == 1 and not as_json)
    if as_json:
        answers = [_answer(text, number, events) for number, text in enumerate(texts)]
        print_json({"answers": answers, "interrupted": not is_whole})
    elif len(texts) > 1:
        for number, text in enumerate(texts):
            said = "".join(event.text for event in events if event.prompt == number)
            sys.stdout.write(f"--- prompt {number}\n{text}{said}\n")
    if not is_whole:
        raise KeyboardInterrupt


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error})") from None


def _run(
    engine: Engine, texts: Sequence[str], options: GenerateOptions, is_streaming: bool
) -> tuple[list[Event], bool]:
    """Generate everything, or what there is at Ctrl-C; the events, and whether they are all.

    With streaming the text is written as it comes. Speed to stderr.
    """
    events: list[Event] = []
    is_whole = True
    start = first = time.perf_counter()
    try:
        with prefill_progress(sum(map(len, texts))) as progress:
            # Refuses before anything is said.
            stream = engine.generate(texts, options, progress)
            note(f"running on {engine.provider}")
            for event in stream:
                if not events:
                    first = time.perf_counter()
                    if is_streaming:
                        sys.stdout.write(texts[0])
                events.append(event)
                if is_streaming:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        is_whole = False
    end = time.perf_counter()
    if is_streaming and events:
        sys.stdout.write("\n")
    if is_whole:
        _note_speed(events, options, first - start, end - first)
    else:
        note("(stopped)")
    return events, is_whole


def _note_speed(
    events: Sequence[Event], options: GenerateOptions, first: float, rest: float
) -> None:
    """first, rest: seconds to the first token, and to the others after it."""
    later = len(events) - 1
    speed = f", then {later / rest:.1f} tokens/s" if later else ""
    note(f"first token after {first:.2f} s{speed}")
    if options.draft:
        note(drafting_line(events))


def _answer(text: str, number: int, events: Sequence[Event]) -> dict[str, object]:
    mine = [event for event in events if event.prompt == number]
    answer: dict[str, object] = {
        "prompt": text,
        "text": "".join(event.text for event in mine),
        "tokens": [event.choice.token for event in mine],
        "finish": mine[-1].finish if mine else None,
    }
    if not mine:
        return answer
    if mine[0].choice.logprob is not None:
        answer["logprobs"] = [event.choice.logprob for event in mine]
        answer["top_logprobs"] = [[list(pair) for pair in event.choice.top] for event in mine]
    if mine[-1].drafts is not None:
        answer |= drafting_figures(mine)
    return answer
