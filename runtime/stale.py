"""Stale marks: from which position the pools of a sequence must be made again.

Marks combine by minimum and are taken before an edit changes anything; only a step that succeeded
clears them. Knows positions, never rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

EVERY = -1  # in the place of a sequence id: all sequences


class StaleMarks:
    """The marks of all sequences. An edit that was refused must not be told here."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._marks: dict[int, int] = {}

    def marks(self) -> dict[int, int]:
        """The position of each marked sequence, as a copy."""
        return dict(sorted(self._marks.items()))

    def mark(self, sequence: int, position: int) -> None:
        """Pools that end at or after a position are stale."""
        self._marks[sequence] = min(position, self._marks.get(sequence, position))

    def removed(self, sequence: int, start: int, firsts: Mapping[int, int]) -> None:
        """Positions from `start` on are taken away, even where there are none.

        firsts: the first position of each sequence that holds any. At or below it, and for EVERY,
        all is stale.
        """
        if sequence == EVERY:
            self.reset()
        else:
            self.mark(sequence, _from(start, firsts.get(sequence)))

    def copied(self, target: int) -> None:
        """A sequence was copied over the target; the source stays as it is."""
        self.mark(target, 0)

    def shifted(
        self, sequence: int, start: int, delta: int, firsts: Mapping[int, int]
    ) -> None:
        """Positions from `start` on move by `delta`; those they move onto are stale too."""
        self.mark(sequence, _from(start + min(delta, 0), firsts.get(sequence)))

    def replaced(self, sequence: int) -> None:
        """Positions were divided, or the sequence restored from a saved state."""
        self.mark(sequence, 0)

    def reset(self) -> None:
        """One sequence was kept or all were cleared: every one is stale, the kept one too."""
        self._marks = dict.fromkeys(range(self._sequences), 0)

    def clear(self, done: Iterable[int]) -> None:
        """The step that made the pools of these sequences again has succeeded."""
        for sequence in done:
            self._marks.pop(sequence, None)


def _from(position: int, first: int | None) -> int:
    """A mark at or below a sequence's first position covers all of it."""
    return 0 if position < 0 or (first is not None and position <= first) else position
