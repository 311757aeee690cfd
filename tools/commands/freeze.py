"""`cachegraph freeze`: more static graphs for a bundle, on the same weights file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachegraph.tools.output import JsonFlag, print_json
from cachegraph.tools.static_sizes import parse_size


def command(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="Folder that `cachegraph export` wrote.")
    ],
    sizes: Annotated[
        list[str],
        typer.Argument(
            metavar="SxPxN...", help="Streams, tokens per stream, compressed rows exposed."
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Write static graphs of chosen sizes from a bundle's template.

    Example: cachegraph freeze out/tiny 1x1x64 1x16x64
    """
    wanted = [parse_size(text) for text in sizes]
    from cachegraph.graphgen import StaticSize, freeze_bundle

    graphs = freeze_bundle(bundle, [StaticSize(*size) for size in wanted])
    if as_json:
        print_json({"graphs": [{"file": g.file, "dims": g.dims} for g in graphs]})
    else:
        for graph in graphs:
            typer.echo(str(bundle / graph.file))
