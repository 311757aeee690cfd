"""One measured program each in a process of its own, so that no thread pool disturbs another.

The parent asks a worker for one repetition at a time and can so take turns between programs; what a
worker holds (a model, caches) stays loaded between repetitions. transformers is imported in its own
worker only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.errors import CachegraphError


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one repetition, and how much of it was not the graph call (ours only)."""

    seconds: float
    host_seconds: float = 0.0


class Program(Protocol):
    """What is measured: a text is read, then tokens are decoded one by one."""

    def prefill(self, seq_id: int, tokens: NDArray[np.int64]) -> Timing:
        """Forget the sequence and read `tokens`."""

    def decode(self, seq_id: int, count: int) -> Timing:
        """Decode `count` tokens, each the best one after the last."""


class _TimedSession:
    """Adds up the time of graph calls."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.seconds = 0.0

    def run_with_iobinding(self, binding: Any) -> None:
        """Run and add up the time."""
        start = time.perf_counter()
        self._session.run_with_iobinding(binding)
        self.seconds += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class OurProgram:
    """A bundle on the engine."""

    def __init__(self, bundle: str, threads: int, device: str) -> None:
        from cachegraph.runtime import Engine
        from cachegraph.runtime.part import GraphPart

        self._engine = Engine.load(bundle, threads=threads, device=device)
        graph = self._engine._graph
        assert isinstance(graph, GraphPart), "bench measures bundles of one graph"
        self._session = _TimedSession(graph.session)
        graph.session = self._session
        self._next = dict.fromkeys(range(self._engine.num_sequences), 0)

    def prefill(self, seq_id: int, tokens: NDArray[np.int64]) -> Timing:
        """As of `Program`."""
        self._engine.clear(seq_id)
        return self._timed(lambda: self._read(seq_id, tokens))

    def decode(self, seq_id: int, count: int) -> Timing:
        """As of `Program`."""

        def run() -> None:
            for _ in range(count):
                self._read(seq_id, np.array([self._next[seq_id]]))

        return self._timed(run)

    def _read(self, seq_id: int, tokens: NDArray[np.int64]) -> None:
        self._next[seq_id] = int(self._engine.append(tokens, seq_id).argmax())

    def _timed(self, work: Any) -> Timing:
        self._session.seconds = 0.0
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        return Timing(seconds=seconds, host_seconds=seconds - self._session.seconds)


class TransformersProgram:
    """The same checkpoint in transformers, f32, with its own cache.

    experts: "eager" loops over experts in Python; None takes transformers' own choice of kernel.
    """

    def __init__(self, checkpoint: str, threads: int, experts: str | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        choice: dict[str, Any] = {} if experts is None else {"experts_implementation": experts}
        self._model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, **choice
        )
        self._model.train(mode=False)
        self._state: dict[int, tuple[Any, int]] = {}

    def prefill(self, seq_id: int, tokens: NDArray[np.int64]) -> Timing:
        """As of `Program`."""
        return self._timed(lambda: self._read(seq_id, tokens.tolist(), None))

    def decode(self, seq_id: int, count: int) -> Timing:
        """As of `Program`."""

        def run() -> None:
            for _ in range(count):
                cache, token = self._state[seq_id]
                self._read(seq_id, [token], cache)

        return self._timed(run)

    def _read(self, seq_id: int, tokens: list[int], cache: Any) -> None:
        with self._torch.inference_mode():
            out = self._model(
                self._torch.tensor([tokens]), cache=cache, use_cache=True, logits_to_keep=1
            )
        self._state[seq_id] = (out.cache, int(out.logits[0, -1].argmax()))

    def _timed(self, work: Any) -> Timing:
        start = time.perf_counter()
        work()
        return Timing(seconds=time.perf_counter() - start)


_PROGRAMS: dict[str, Callable[..., Program]] = {
    "ours": OurProgram,
    "transformers": TransformersProgram,
}


class Worker:
    """A program in its own process. A context manager: leaving it ends the process."""

    def __init__(self, program: str, arguments: Mapping[str, Any]) -> None:
        spawn = get_context("spawn")
        self._here, there = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve, args=(there, program, dict(arguments)), daemon=True
        )
        self._process.start()
        there.close()
        self._receive()

    def prefill(self, seq_id: int, tokens: NDArray[np.int64]) -> Timing:
        """As of `Program`."""
        return self._ask("prefill", seq_id, tokens)

    def decode(self, seq_id: int, count: int) -> Timing:
        """As of `Program`."""
        return self._ask("decode", seq_id, count)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._here.close()
        self._process.join(timeout=10)
        self._process.kill()

    def _ask(self, *call: Any) -> Timing:
        self._here.send(call)
        timing = self._receive()
        assert isinstance(timing, Timing)
        return timing

    def _receive(self) -> Any:
        try:
            answer = self._here.recv()
        except EOFError:
            raise CachegraphError("a bench worker ended early; see its output above") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, program: str, arguments: dict[str, Any]) -> None:
    try:
        held = _PROGRAMS[program](**arguments)
        pipe.send(None)
    except Exception as error:
        pipe.send(CachegraphError(f"{program}: {error}"))
        return
    while True:
        try:
            method, *rest = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(held, method)(*rest))
        except Exception as error:
            pipe.send(CachegraphError(f"{program}: {error}"))
