"""Lists of whole numbers on the command line, such as 7,1,64."""

from __future__ import annotations

from cachegraph.models.errors import ConfigError

_MOST = 10**9


def parse_counts(option: str, text: str) -> list[int]:
    """The numbers of a comma-separated list, each 1 or more; ConfigError names the option."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r}; wanted whole numbers, such as 7,1,64") from None
    if min(counts) < 1:
        raise ConfigError(f"{option} {text!r}; every number must be 1 or more")
    if max(counts) > _MOST:
        raise ConfigError(f"{option} {text!r}; no number may be above {_MOST}")
    return counts
