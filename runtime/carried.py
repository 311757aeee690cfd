"""What a drafter knows of one sequence: its newest residual streams, and how far its pairs go.

The pair of position p is token p with the streams of position p - 1; the first token of a sequence
has none. Knows nothing of graphs or of raw rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.contract import CarriedSpec

Rows = NDArray[np.float32]


@dataclass(slots=True)
class Carried:
    """Streams of positions first .. end - 1, the newest `spec.rows` of them at most.

    tokens: the ids of positions 0 .. end - 1, by which edits of the sequence are found. paired:
    one past the last position whose pair is in the raw rows; it may be end + 1, and `ahead` is the
    token of that last pair then. rewrites: the table's count of them when the sequence was last
    looked at.
    """

    spec: CarriedSpec
    rows: Rows
    first: int = 0
    end: int = 0
    paired: int = 0
    ahead: int | None = None
    rewrites: int = 0
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, spec: CarriedSpec) -> Carried:
        """Of an empty sequence."""
        return cls(spec, np.zeros((spec.rows, spec.width), np.float32))

    @property
    def can_pair(self) -> bool:
        """Whether the streams of the newest position are held."""
        return self.first < self.end

    def add(self, tokens: Sequence[int], rows: Rows) -> None:
        """Take the streams of the next positions; only the newest are kept."""
        self.end += len(tokens)
        self.tokens += tokens
        kept = min(len(tokens), self.spec.rows)
        self.rows[np.arange(self.end - kept, self.end) % self.spec.rows] = rows[-kept:]
        self.first = max(self.first, self.end - self.spec.rows)

    def before(self, first: int, end: int) -> Rows:
        """The streams that pairs of positions first .. end - 1 carry, as a copy."""
        rows: Rows = self.rows[np.arange(first - 1, end - 1) % self.spec.rows]
        return rows

    def held(self) -> Rows:
        """The streams of all positions held, oldest first, as a copy."""
        return self.before(self.first + 1, self.end + 1)

    def cut(self, position: int) -> None:
        """Forget what was known of positions from `position` on."""
        del self.tokens[position:]
        self.end = min(self.end, position)
        self.first = min(self.first, self.end)
        self.paired, self.ahead = min(self.paired, position), None

    def begin_at(self, position: int, tokens: Sequence[int]) -> None:
        """Know nothing of the `position` tokens before: no pair reaches back to them."""
        self.first = self.end = self.paired = position
        self.ahead, self.tokens = None, list(tokens)

    def take(self, other: Carried) -> None:
        """Become a copy of what another sequence's is."""
        self.rows[...] = other.rows
        self.first, self.end, self.paired = other.first, other.end, other.paired
        self.ahead, self.tokens = other.ahead, list(other.tokens)
