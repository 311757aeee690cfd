"""`cachegraph plan`: what each step of a prompt would write, read and close."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachegraph.models.errors import ConfigError
from cachegraph.models.manifest import read_manifest
from cachegraph.tools.counts import parse_counts
from cachegraph.tools.errors import CheckFailedError
from cachegraph.tools.output import JsonFlag, print_json


def command(
    bundle: Annotated[
        Path | None,
        typer.Argument(metavar="BUNDLE", help="Folder of a bundle, with weights or without."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Tokens that each sequence gets in each step; positions go on.",
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences side by side.")] = 1,
    vectors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare our planners with a file of recorded scenarios instead; exits 1 where "
            "one differs that is not known to be wrong.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the plan of each step of a made-up prompt. Needs neither onnx nor ONNX Runtime.

    Shown are the bucket, every input before and after padding, and the rows that each cache writes
    and reads. Lists are runs: 0..5 is 0 to 5, 7 x3 is three times 7.

    Example: cachegraph plan out/tiny --tokens 11,1,1 --sequences 2
    """
    if vectors is not None:
        if bundle is not None or tokens is not None:
            raise ConfigError("--vectors stands alone: it takes neither BUNDLE nor --tokens")
        _run_vectors(vectors, as_json)
        return
    if bundle is None or tokens is None:
        raise ConfigError("nothing to plan; give BUNDLE and --tokens, or --vectors FILE")
    sizes = parse_counts("--tokens", tokens)
    manifest = read_manifest(bundle)
    from cachegraph.tools.plan_steps import plan_steps
    from cachegraph.tools.plan_text import step_lines, steps_json

    steps = list(plan_steps(manifest, sizes, sequences))
    if as_json:
        print_json(steps_json(steps))
        return
    for number, step in enumerate(steps, 1):
        for line in step_lines(number, step, manifest):
            typer.echo(line)


def _run_vectors(path: Path, as_json: bool) -> None:
    from cachegraph.tools.conformance.report import run_vectors

    report = run_vectors(path)
    if as_json:
        print_json(
            {
                "matching": report.num_matching,
                "differences": [str(difference) for difference in report.differences],
                "deviations": {name: list(rules) for name, rules in report.deviations},
                "not_run": dict(report.not_run),
            }
        )
    else:
        for line in report.lines():
            typer.echo(line)
    if not report.is_ok:
        raise CheckFailedError(f"{len(report.differences)} scenarios of {path} differ")
