"""`cachegraph inspect`: what a bundle is, what memory it takes, every tensor of its graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachegraph.models.errors import ContractError
from cachegraph.models.manifest import read_manifest
from cachegraph.tools.errors import CheckFailedError
from cachegraph.tools.output import JsonFlag, note, print_json


def command(
    bundle: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE", help="Folder of a bundle, with weights or without."),
    ],
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Hash the weights files; exits 1 where one is not the one exported.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Describe a bundle from its manifest alone. Needs neither onnx nor ONNX Runtime.

    Shown are the model's sizes, cache memory, the ladder of buckets, every graph input and output
    with its padding rule, and the files. The graphs themselves are not opened.

    Example: cachegraph inspect out/tiny --verify
    """
    manifest = read_manifest(bundle)
    from cachegraph.tools.inspect_text import manifest_json, manifest_lines

    if verify:
        _verify(bundle)
    if as_json:
        print_json({**manifest_json(manifest), "weights_verified": verify})
        return
    for line in manifest_lines(manifest):
        typer.echo(line)
    if verify:
        note("the weights are those that were exported")


def _verify(bundle: Path) -> None:
    """CheckFailedError where the hash differs; ContractError where there is nothing to hash."""
    from cachegraph.runtime.bundle import open_bundle
    from cachegraph.runtime.bundle import verify as verify_weights

    open_bundle(bundle)
    try:
        verify_weights(bundle)
    except ContractError as error:
        raise CheckFailedError(str(error)) from None
