"""How much a bundle holds: context, sequences and the longest step. Fixed at export."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cachegraph.models.errors import ConfigError

# Far above what a machine holds, and low enough that sizes are computed in no time.
_BOUNDS = {
    "context": (1, 2**28),
    "sequences": (1, 2**12),
    "max_step": (1, 2**14),
    "rewind": (0, 2**12),
    "pinned": (0, 2**14),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Sizes chosen at export.

    context: positions 0 .. context-1 of each sequence. sequences: streams in every cache.
    max_step: the largest number of tokens of one sequence in one graph call. rewind: tokens that
    can be taken back from the end of a sequence without copying anything. pinned: first positions
    of each sequence whose raw rows are kept for good and seen by every later token; the published
    model has none, so that its answers are owed for 0 only.
    """

    context: int = 4096
    sequences: int = 1
    max_step: int = 128
    rewind: int = 8
    pinned: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least, most = _BOUNDS[field.name]
            if not least <= value <= most:
                raise ConfigError(f"{field.name} is {value}; it must be {least} to {most}")
