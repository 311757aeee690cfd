"""`cachegraph chat`: a conversation on the terminal, through the bundle's chat template."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachegraph.models.errors import CapacityError, ConfigError
from cachegraph.tools.drafting import drafting_line
from cachegraph.tools.engine_options import (
    BundleArgument,
    DeviceOption,
    DraftOption,
    SpinningOption,
    ThreadsOption,
    open_engine,
)
from cachegraph.tools.output import note
from cachegraph.tools.progress import prefill_progress

if TYPE_CHECKING:
    from cachegraph.runtime import Engine, Event, GenerateOptions


def command(
    bundle: BundleArgument,
    template: Annotated[
        Path | None, typer.Option(help="Jinja chat template to use instead of the bundle's.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens of this mass.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    draft: DraftOption = 0,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 0,
    spinning: SpinningOption = True,
) -> None:
    """Chat with a bundle whose tokenizer has a chat template. Ctrl-D ends, Ctrl-C stops an answer.

    Example: cachegraph chat out/model --system "Answer briefly."
    """
    from cachegraph.runtime import GenerateOptions, SamplingOptions
    from cachegraph.runtime.chat_template import ChatTemplate

    options = GenerateOptions(
        max_tokens=max_tokens,
        sampling=SamplingOptions(temperature=temperature, top_p=top_p, seed=seed),
        draft=draft,
    )
    with open_engine(bundle, device, threads, spinning, draft=draft > 0) as engine:
        if engine.codec is None:
            raise ConfigError(f"{bundle} has no tokenizer; chat needs one")
        chat = ChatTemplate.load(engine.codec, template)
        messages = [{"role": "system", "content": system}] if system else []
        while (line := _ask()) is not None:
            messages.append({"role": "user", "content": line})
            ids = engine.codec.encode(chat.render(messages), add_bos=False)
            try:
                events = _answer(engine, ids, options)
            except CapacityError as error:
                note(f"error: {error}")
                messages.pop()
                continue
            answer = "".join(event.text for event in events)
            messages.append({"role": "assistant", "content": answer})
            if draft and events and events[-1].finish is not None:
                note(drafting_line(events))


def _ask() -> str | None:
    """The next non-empty line, or None at the end of input."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return None
        if line.strip():
            return line.strip()


def _answer(engine: Engine, ids: list[int], options: GenerateOptions) -> list[Event]:
    """Stream one answer; Ctrl-C ends it early and keeps what was said."""
    events: list[Event] = []
    try:
        with prefill_progress(len(ids)) as progress:
            for event in engine.generate([ids], options, progress):
                events.append(event)
                sys.stdout.write(event.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        note("(stopped)")
    sys.stdout.write("\n")
    return events
