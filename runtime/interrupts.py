"""Ctrl-C between steps, never inside one.

While a graph runs and its result is committed, an interrupt waits; it is raised right after, when
memory is whole again. In threads other than the main one Python delivers none, so nothing is done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back SIGINT inside the block; KeyboardInterrupt is raised at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        pending = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        raise KeyboardInterrupt
