"""How a static graph's size is written on the command line: SxPxN, such as 1x64x512."""

from __future__ import annotations

import re

from cachegraph.models.errors import ConfigError


def parse_size(text: str) -> tuple[int, int, int]:
    """Streams, tokens per stream and compressed rows exposed."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ConfigError(
            f"static graph {text!r}; it is written STREAMSxSTEPxCONTEXT, such as 1x64x512"
        )
    streams, step, context = (int(part) for part in match.groups())
    return streams, step, context
