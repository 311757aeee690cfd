"""Who gets a SIGINT that came inside a graph call, and when."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from cachegraph.models.errors import ConfigError
from cachegraph.runtime.continuation import GenerateOptions
from cachegraph.runtime.interrupts import interrupts_held

pytestmark = pytest.mark.r0


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def interrupted() -> list[str]:
    steps = []
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        steps.append("whole")
    steps.append("after")
    return steps


def test_the_usual_handler_raises_after_the_block() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert interrupted() == ["whole", "after"]


def test_a_program_s_own_handler_is_called_once_after_the_block() -> None:
    calls: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert calls == []
    assert calls == [signal.SIGINT]


@pytest.mark.parametrize("count", [1.5, "3", None])
def test_a_token_count_that_is_no_whole_number_is_refused(count: Any) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        GenerateOptions(max_tokens=count)
