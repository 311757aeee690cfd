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
    """Hold back SIGINT inside the block; the handler that was there gets it at the end.

    An ignored SIGINT stays ignored, and a handler that Python did not install is left alone.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[0])
