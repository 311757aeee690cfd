"""Options that every command which runs a bundle shares, and how they open an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cachegraph.runtime import Engine

BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="Folder that `cachegraph export` wrote.")
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="auto (CUDA where ONNX Runtime offers it), cpu, cuda or cuda:1. Stages of a split "
        "bundle run where it says with auto and cuda, else all on the one named."
    ),
]
ThreadsOption = Annotated[
    int,
    typer.Option(min=0, max=1024, help="Threads of one step; 0 leaves it to ONNX Runtime."),
]
SpinningOption = Annotated[
    bool,
    typer.Option(help="Let idle threads burn CPU between steps, to answer sooner."),
]
DraftOption = Annotated[
    int,
    typer.Option(help="Tokens to draft ahead in each step; 0 is off."),
]


def open_engine(
    bundle: Path, device: str, threads: int, spinning: bool, *, draft: bool = False
) -> Engine:
    """Load a bundle with the shared options; errors as of `Engine.load`."""
    from cachegraph.runtime import Engine

    return Engine.load(bundle, device=device, threads=threads, spinning=spinning, draft=draft)
