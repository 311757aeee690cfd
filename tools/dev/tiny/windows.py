"""How a file is cut into overlapping windows so that each of its tokens is scored once.

A window starts at a multiple of the stride. From the second on only tokens that the windows
before did not reach are scored, so each of those has more than `size - stride` tokens of
context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Inputs start .. end-1 of a file; the targets scored are first .. end."""

    start: int
    end: int
    first: int


def windows(length: int, *, size: int, stride: int) -> Iterator[Window]:
    """Cut a file of `length` tokens (BOS included) into windows of at most `size` inputs."""
    first = 1
    for start in range(0, length, stride):
        end = min(start + size, length - 1)
        if first > end:
            return
        yield Window(start=start, end=end, first=first)
        first = end + 1
