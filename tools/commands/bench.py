"""`cachegraph bench`: measured speed beside transformers, written to a Markdown file."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cachegraph.models.errors import ConfigError
from cachegraph.models.export_options import WeightType
from cachegraph.tools.engine_options import DeviceOption
from cachegraph.tools.output import note


class Suite(StrEnum):
    """What can be measured."""

    shipped = "shipped"
    medium = "medium"
    context = "context"
    caches = "caches"
    drafting = "drafting"
    shipped_hybrid = "shipped-hybrid"
    hybrid = "hybrid"
    hybrid_context = "hybrid-context"


def _weight_type(text: str) -> str:
    names = [form.value for form in WeightType]
    if text not in names:
        raise ConfigError(f"--weights {text!r}; there are {', '.join(names)}")
    return text


def command(
    suite: Annotated[
        list[Suite] | None,
        typer.Option(
            help="shipped: the shipped model. medium: a random model of 690M parameters (makes "
            "a checkpoint of 1.4 GB and bundles of 4 GB). context: step time of that model at "
            "16k tokens against 1k. caches: memory and perplexity of each cache type. drafting: "
            "the shipped model with and without drafts. shipped-hybrid, hybrid, hybrid-context: as "
            "shipped, medium and context, with the shipped Qwen4-Exp and a random one of 320M "
            "parameters, at 2k tokens, and at 32k against 2k. Default: shipped."
        ),
    ] = None,
    peers: Annotated[
        bool, typer.Option(help="Measure transformers beside it (needs the test extra).")
    ] = True,
    weights: Annotated[
        str,
        typer.Option(help="Weight forms of all suites but shipped and caches."),
    ] = "f32,int8,int4",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every program.")] = 2,
    device: DeviceOption = "cpu",
    work: Annotated[
        Path, typer.Option(help="Folder for checkpoints and bundles; kept for the next run.")
    ] = Path("out/bench"),
    out: Annotated[
        Path | None, typer.Option(help="Markdown file to write the tables to.")
    ] = None,
) -> None:
    """Measure decode and prefill speed, as ratios in one run, medians of the repetitions.

    The suite `caches` measures no speed: memory and perplexity of each cache type.

    Example: cachegraph bench --suite shipped --out docs/benchmarks.md
    """
    from cachegraph.tools.bench.suites import Bench

    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        work=work,
        threads=threads,
        repeats=repeats,
        device=device,
        with_peers=peers,
        weights=tuple(_weight_type(text) for text in weights.split(",")),
        report=note,
    )
    from cachegraph.tools.bench.tables import machine_lines, replace_section

    for name in suite or [Suite.shipped]:
        with ExitStack() as stack:
            title, lines = bench.run(name.value, stack)
        lines = [*machine_lines(threads), "", *lines]
        typer.echo("\n".join([f"## {title}", "", *lines, ""]))
        if out is not None:
            replace_section(out, title, lines)
