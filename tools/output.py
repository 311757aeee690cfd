"""Where a command's words go: results on stdout, everything else on stderr.

With `--json` stdout holds exactly one JSON object, so that a program may read it while progress
and notes still reach a person.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, for programs.")
]


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object on stdout. Values are plain Python; NaN and infinity are ValueError."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def note(text: str) -> None:
    """A line for a person, on stderr."""
    print(text, file=sys.stderr)
