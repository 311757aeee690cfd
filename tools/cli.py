"""The `cachegraph` command: collects the subcommands and turns errors into one line and a code.

Knows no command by itself; `tools/commands` lists them.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from cachegraph.models.version import VERSION
from cachegraph.tools.commands import COMMANDS
from cachegraph.tools.errors import INTERRUPTED, describe, exit_code
from cachegraph.tools.output import note

_DEBUG = "--debug"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code (see `tools/errors.py`)."""
    args, is_debug = _take_debug(sys.argv[1:] if argv is None else argv)
    try:
        command = typer.main.get_command(build_app())
        code = command.main(args or ["--help"], prog_name="cachegraph", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if is_debug:
            traceback.print_exception(error)
        note(f"error: {describe(error)}")
        return exit_code(error)
    return code if isinstance(code, int) else 0


def build_app() -> typer.Typer:
    """The typer application with every subcommand."""
    app = typer.Typer(
        name="cachegraph",
        help="Export long-context decoders to ONNX graphs with explicit caches, and run them.",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    for name in COMMANDS:
        module = import_module(f"cachegraph.tools.commands.{name}")
        app.command(name)(module.command)
    return app


def _take_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without --debug, which may stand anywhere before `--`, and whether it did."""
    end = argv.index("--") if "--" in argv else len(argv)
    options = [arg for arg in argv[:end] if arg != _DEBUG]
    return [*options, *argv[end:]], len(options) < end


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"cachegraph {VERSION}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option(_DEBUG, help="Show tracebacks; may stand anywhere.")
    ] = False,
) -> None:
    """Options before the subcommand; `main` takes --debug out before typer sees it."""


if __name__ == "__main__":
    sys.exit(main())
