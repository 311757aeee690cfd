"""Runs that fail, interrupts, wrong use: what stands, what is dropped; the engine goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.bundles import Bundles, live_rows, open_engine
from support.engines import Call, batch_of, cold, feed, same_bits, watched

from cachegraph.models.errors import CapacityError, StepError, UsageError
from cachegraph.runtime.continuation import GenerateOptions
from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2


class OnCall:
    """A hook that acts at one graph call, counted from 0."""

    def __init__(self, number: int, act: object) -> None:
        self.left = number
        self._act = act

    def __call__(self, call: Call) -> None:
        self.left -= 1
        if self.left == -1:
            if isinstance(self._act, BaseException):
                raise self._act
            self._act()  # type: ignore[operator]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def _interrupts_raise_and_their_handler_is_restored() -> Iterator[None]:
    """A background job starts with SIGINT ignored, which an engine honours."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_failed_call_drops_its_sequences_and_no_others(engine: Engine, moment: str) -> None:
    """`after` is the graph that fails with its rows half written."""
    feed(engine, {0: 9, 1: 6, 2: 4, 3: 2})
    held = live_rows(engine, 3)
    # Chunks of 24, then 24 beside it, then the short tails: see the split.
    hook = {moment: OnCall(1, RuntimeError("the graph broke\nin two lines"))}
    with watched(engine, **hook) as calls, pytest.raises(StepError) as caught:  # type: ignore[arg-type]
        feed(engine, {0: 50, 1: 24, 2: 5})
    first, second = (call.plan.ubatch for call in calls)
    dropped = list(second.streams)
    message = str(caught.value)
    assert f"after {first.tokens.size} tokens of the batch were in" in message
    assert f"sequences {dropped} were dropped" in message
    assert message.endswith("ONNX Runtime says: the graph broke")
    for seq, before in enumerate((9, 6, 4, 2)):
        done = first.step if seq in first.streams else 0
        kept = 0 if seq in dropped else before + done
        assert engine.length(seq) == kept
        if kept:
            assert f"{seq}: {kept}" in message
    assert same_bits(live_rows(engine, 3), held)
    after = feed(engine, dict.fromkeys(range(4), 3))
    lengths = {seq: engine.length(seq) for seq in range(4)}
    for seq, rows in after.items():
        assert np.abs(rows - cold(engine, seq, [1] * lengths[seq])[-3:]).max() <= 1e-5


def test_a_failed_batch_keeps_what_a_sequence_got_in_earlier_calls(engine: Engine) -> None:
    """Sequence 1 is whole in the first call and stands; 0 is dropped in the second."""
    with watched(engine, before=OnCall(1, RuntimeError("no"))), pytest.raises(StepError):
        feed(engine, {0: 48, 1: 24})
    assert [engine.length(seq) for seq in (0, 1)] == [0, 24]
    rows = feed(engine, {1: 2})[1]
    assert np.abs(rows - cold(engine, 1, [26])[-2:]).max() <= 1e-5


def test_ctrl_c_inside_a_call_waits_for_its_commit(engine: Engine) -> None:
    hook = OnCall(1, interrupt)
    with watched(engine, before=hook) as calls, pytest.raises(KeyboardInterrupt):
        feed(engine, {0: 60})
    assert len(calls) == 2
    assert engine.length(0) == 48
    rows = feed(engine, {0: 3})[0]
    assert np.abs(rows - cold(engine, 0, [51])[-3:]).max() <= 1e-5


def test_ctrl_c_between_calls_keeps_the_calls_before_it(engine: Engine) -> None:
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.decode(batch_of(engine, {2: 60}), progress)
    assert seen == [(24, 60)]
    assert engine.length(2) == 24
    assert np.isfinite(feed(engine, {2: 5})[2]).all()


def test_progress_counts_to_the_end(engine: Engine) -> None:
    seen = []
    engine.append([1] * 60, 0, lambda done, total: seen.append((done, total)))
    assert seen == [(24, 60), (48, 60), (60, 60)]


def test_a_failing_call_that_was_interrupted_too_still_says_what_was_dropped(
    engine: Engine,
) -> None:
    def both() -> None:
        interrupt()
        raise RuntimeError("broke")

    feed(engine, {1: 4})
    with watched(engine, before=OnCall(0, both)), pytest.raises(StepError, match="broke"):
        feed(engine, {0: 2})
    assert [engine.length(seq) for seq in (0, 1)] == [0, 4]


def test_another_thread_is_refused_while_a_step_runs(engine: Engine) -> None:
    running, go_on = threading.Event(), threading.Event()

    def wait(call: Call) -> None:
        running.set()
        assert go_on.wait(timeout=30)

    with watched(engine, before=wait):
        worker = threading.Thread(target=feed, args=(engine, {0: 3}))
        worker.start()
        assert running.wait(timeout=30)
        for use in (lambda: feed(engine, {1: 1}), lambda: engine.clear(1)):
            with pytest.raises(UsageError, match="in use by another thread"):
                use()
        go_on.set()
        worker.join(timeout=30)
    assert engine.length(0) == 3
    assert engine.length(1) == 0
    feed(engine, {1: 1})


def test_a_callback_cannot_use_the_engine_that_calls_it(engine: Engine) -> None:
    with pytest.raises(UsageError, match="in use"):
        engine.append([1, 2, 3], 0, lambda done, total: engine.clear())
    assert engine.length(0) == 3


@pytest.mark.parametrize("seq", [-2, 4, 99])
def test_an_unknown_sequence_is_refused(engine: Engine, seq: int) -> None:
    for use in (engine.length, engine.clear, lambda s: engine.append([1], s)):
        with pytest.raises(UsageError, match=f"no sequence {seq}; this bundle holds 0 to 3"):
            use(seq)


def test_closing_twice_is_harmless_and_use_after_it_is_refused(bundles: Bundles) -> None:
    engine = open_engine(bundles.bundle(bundles.checkpoint()))
    feed(engine, {0: 2})
    with engine:
        pass
    engine.close()
    uses = (
        lambda: feed(engine, {0: 1}),
        lambda: engine.clear(),
        lambda: engine.length(0),
        lambda: engine.append([1]),
        lambda: engine.generate([[1]]),
        lambda: engine.provider,
    )
    for use in uses:
        with pytest.raises(UsageError, match="this engine is closed; load the bundle again"):
            use()


@pytest.mark.parametrize("end", ["next", "close"])
def test_a_generator_that_outlives_its_engine_ends_quietly(bundles: Bundles, end: str) -> None:
    with open_engine(bundles.bundle(bundles.checkpoint())) as engine:
        events: Any = engine.generate([[1, 2, 3]], GenerateOptions(ignore_eos=True))
        next(events)
    if end == "next":
        with pytest.raises(UsageError, match="closed"):
            next(events)
    events.close()


def test_buffers_without_memory_are_refused_before_their_call(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call of a batch needs a bucket that cannot be had: the first one stands."""
    engine._graph.calls.clear()
    host = engine._graph._binder.host

    def full(shape: tuple[int, ...], dtype: Any) -> Any:
        if shape == (1, 16):
            raise MemoryError
        return host(shape, dtype)

    monkeypatch.setattr(engine._graph._binder, "host", full)
    wanted = "no memory for the buffers of bucket s1_p16_.*; 24 tokens of the batch are in"
    with watched(engine), pytest.raises(CapacityError, match=wanted):
        feed(engine, {0: 40})
    monkeypatch.undo()
    assert engine.length(0) == 24
    rows = feed(engine, {0: 16})[0]
    assert np.abs(rows - cold(engine, 0, [40])[-16:]).max() <= 1e-5


def test_logits_are_the_callers_own(engine: Engine) -> None:
    """The next step of the same bucket does not change rows that were returned."""
    with watched(engine) as calls:
        first = feed(engine, {0: 1})[0]
        kept = first.copy()
        second = feed(engine, {0: 1})[0]
    assert calls[0].arrays["tokens"] is calls[1].arrays["tokens"]
    assert np.array_equal(first, kept)
    assert not np.array_equal(first, second)
