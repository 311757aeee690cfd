"""`cachegraph generate`: text that follows one prompt or several."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachegraph.models.errors import ConfigError
from cachegraph.tools.engine_options import (
    BundleArgument,
    DeviceOption,
    SpinningOption,
    ThreadsOption,
    open_engine,
)
from cachegraph.tools.output import JsonFlag, note, print_json
from cachegraph.tools.progress import prefill_progress

if TYPE_CHECKING:
    from cachegraph.runtime import Event


def command(
    bundle: BundleArgument,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to continue; several run in one batch."),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="File whose text is a prompt.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest one.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 repeats less.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Also give log-probabilities of the n best (JSON).")
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 0,
    spinning: SpinningOption = True,
    as_json: JsonFlag = False,
) -> None:
    """Generate text with a bundle, streaming it as it comes; speed goes to stderr.

    Example: cachegraph generate out/tiny --prompt "import os" --max-tokens 64
    """
    texts = [*(prompt or []), *(p.read_text(encoding="utf-8") for p in prompt_file or [])]
    if not texts:
        raise ConfigError("nothing to continue; give --prompt TEXT or --prompt-file FILE")
    from cachegraph.runtime import GenerateOptions, SamplingOptions

    options = GenerateOptions(
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        sampling=SamplingOptions(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            logprobs=logprobs,
        ),
    )
    with open_engine(bundle, device, threads, spinning) as engine:
        note(f"running on {engine.provider}")
        is_streaming = len(texts) == 1 and not as_json
        if is_streaming:
            sys.stdout.write(texts[0])
        start = time.perf_counter()
        events: list[Event] = []
        with prefill_progress(sum(map(len, texts))) as progress:
            for event in engine.generate(texts, options, progress):
                events.append(event)
                if is_streaming:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
        seconds = time.perf_counter() - start
    _print(texts, events, is_streaming, as_json)
    speed = len(events) / seconds
    note(f"\n{len(events)} tokens in {seconds:.2f} s, {speed:.1f} tokens/s (prompt included)")


def _print(
    texts: Sequence[str], events: Sequence[Event], is_streaming: bool, as_json: bool
) -> None:
    answers = []
    for number, text in enumerate(texts):
        mine = [event for event in events if event.prompt == number]
        answers.append(
            {
                "prompt": text,
                "text": "".join(event.text for event in mine),
                "tokens": [event.choice.token for event in mine],
                "finish": mine[-1].finish,
                **_logprobs(mine),
            }
        )
    if as_json:
        print_json({"answers": answers})
    elif is_streaming:
        sys.stdout.write("\n")
    else:
        for number, answer in enumerate(answers):
            sys.stdout.write(f"--- prompt {number}\n{answer['prompt']}{answer['text']}\n")


def _logprobs(events: Sequence[Event]) -> dict[str, object]:
    if events[0].choice.logprob is None:
        return {}
    return {
        "logprobs": [event.choice.logprob for event in events],
        "top_logprobs": [[list(pair) for pair in event.choice.top] for event in events],
    }
