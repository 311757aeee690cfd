"""What a caller may ask a drafter for: how many drafts, and which ids. Pure checks."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from cachegraph.models.capacity import Capacity
from cachegraph.models.errors import BatchError, CapacityError, ConfigError


def draft_count(seq: int, count: object, length: int, capacity: Capacity) -> int:
    """A number of drafts behind a sequence of `length` tokens and its next one.

    ConfigError where it is none that can be taken back, CapacityError where they do not fit.
    """
    rewind = capacity.rewind
    if not _is_integer(count):
        got = "none" if count is None else type(count).__name__
        raise ConfigError(
            f"sequence {seq}: the number of drafts must be an integer from 1 to {rewind}, "
            f"got {got}"
        )
    if not 1 <= count <= rewind:
        raise ConfigError(
            f"sequence {seq}: {count} drafts asked for; 1 to {rewind} can be taken "
            "back; draft fewer, or export with a larger --rewind"
        )
    if length + 1 + count > capacity.context:
        raise CapacityError(
            f"sequence {seq} holds {length} tokens; {count} drafts behind the next "
            f"one do not fit the context of {capacity.context}; draft fewer"
        )
    return int(count)


def token_id(seq: int, token: object, vocab_size: int) -> int:
    """An id that a caller gave for a sequence; BatchError where it is none."""
    last = vocab_size - 1
    if not _is_integer(token):
        raise BatchError(
            f"sequence {seq}: ids must be integers from 0 to {last}, got {type(token).__name__}"
        )
    if not 0 <= token <= last:
        raise BatchError(
            f"sequence {seq}: id {token} is not in the vocabulary, which has ids 0 to {last}"
        )
    return int(token)


def _is_integer(value: object) -> TypeGuard[int | np.integer]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
