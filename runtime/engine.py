"""The engine: one bundle, one device, its sequences.

A batch is checked, split and placed whole before its first graph call; from then on each ubatch is
planned, padded, run and committed on its own. Planning is pure and committing comes last, so a step
that was refused leaves no trace. Knows nothing of text: `generate` turns ids into it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.buckets import Bucket
from cachegraph.models.contract import CacheKind
from cachegraph.models.errors import (
    CachegraphError,
    CapacityError,
    ConfigError,
    StepError,
    UsageError,
)
from cachegraph.models.manifest import Manifest
from cachegraph.runtime.batch import Batch, check_batch
from cachegraph.runtime.binding import (
    Binder,
    BoundCall,
    CpuBinder,
    CudaBinder,
    allocate_caches,
    bind_call,
)
from cachegraph.runtime.bundle import open_bundle
from cachegraph.runtime.cells import CellTable
from cachegraph.runtime.generate import Event, GenerateOptions, generate
from cachegraph.runtime.interrupts import interrupts_held
from cachegraph.runtime.memory import MemoryReport, initial_caches, memory_report
from cachegraph.runtime.ort import (
    DeviceName,
    Optimization,
    SessionOptions,
    load_onnxruntime,
    open_session,
    pick_device,
)
from cachegraph.runtime.padding import Filler
from cachegraph.runtime.planners.step import StepPlan, StepSizes, pick_bucket, plan_step
from cachegraph.runtime.split import UBatch, split_batch
from cachegraph.runtime.text import TextCodec

Logits = NDArray[np.float32]
LOGITS = "logits"


class Engine:
    """Runs one bundle. Not for several threads at once: concurrent use raises UsageError."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        session: Any,
        binder: Binder,
        device: Literal["cpu", "cuda"],
    ) -> None:
        """Use `Engine.load`. Allocates every cache; nothing is kept where one cannot be had."""
        self.folder = folder
        self.manifest = manifest
        self.device = device
        self._contract = manifest.contract
        self._session = session
        self._binder = binder
        self._caches = allocate_caches(binder, self._contract, initial_caches(self._contract))
        self._cells = CellTable(
            self._contract.layout(CacheKind.RAW), manifest.planners.raw.window
        )
        self._sizes = StepSizes.of(manifest.planners, self._contract)
        self._filler = Filler(self._contract, manifest.planners)
        self._calls: dict[Bucket, BoundCall] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        *,
        device: DeviceName = "auto",
        threads: int = 0,
        spinning: bool = True,
        optimization: Optimization = "all",
    ) -> Engine:
        """Open a bundle.

        Args:
            bundle: the folder that an export wrote.
            device: auto takes CUDA where ONNX Runtime offers it; cuda without one is an error.
            threads: of one graph call; 0 leaves the choice to ONNX Runtime.
            spinning: whether idle threads burn CPU to answer sooner.
            optimization: disable, basic, extended, layout or all.

        Raises ContractError for what is no bundle or needs a newer ONNX Runtime, DependencyError
        where ONNX Runtime is missing, DeviceError, CapacityError.
        """
        folder, manifest = open_bundle(Path(bundle))
        ort = load_onnxruntime()
        options = SessionOptions(threads=threads, spinning=spinning, optimization=optimization)
        where = pick_device(ort, device)
        session = open_session(ort, folder, manifest, where, options)
        binder: Binder = CpuBinder(ort) if where == "cpu" else CudaBinder(ort)
        return cls(folder, manifest, session, binder, where)

    @property
    def provider(self) -> str:
        """The ONNX Runtime execution provider that runs."""
        self._check_open()
        return str(self._session.get_providers()[0])

    @property
    def memory(self) -> MemoryReport:
        """Cache bytes by kind."""
        return memory_report(self._contract)

    @property
    def num_sequences(self) -> int:
        """How many sequences the caches hold."""
        return self.manifest.capacity.sequences

    def length(self, seq_id: int) -> int:
        """Tokens that a sequence holds: the position it expects next."""
        self._check_open()
        self._check_seq(seq_id)
        return self._cells.next_position(seq_id)

    def decode(
        self, batch: Batch, progress: Callable[[int, int], None] | None = None
    ) -> Logits:
        """Run a batch; returns float32 [n, vocab], a row for each token that wants logits.

        Rows come in the caller's token order. `progress` gets tokens done and tokens in all after
        each graph call; an exception it raises (KeyboardInterrupt too) stops between calls: the
        calls before it stand.

        Raises BatchError or CapacityError before anything has changed. StepError when a graph call
        failed: earlier calls stand, the sequences in that call are dropped, and the error says so.
        """
        with self._in_use():
            check_batch(
                batch,
                vocab_size=self.manifest.vocab_size,
                context=self.manifest.capacity.context,
                sequences=self.num_sequences,
                next_positions=self._cells.next_positions(),
            )
            ubatches = split_batch(batch, self.manifest.ladder)
            self._cells.check_room(ubatches)
            return self._run_all(batch, ubatches, progress)

    def prefill(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        seq_id: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Logits:
        """Append tokens to a sequence; returns the logits after the last one, float32 [vocab]."""
        start = self.length(seq_id)
        count = len(tokens)
        wanted = np.zeros(count, np.bool_)
        wanted[-1:] = True
        batch = Batch.of(
            tokens, np.arange(start, start + count), [seq_id] * count, logits=wanted
        )
        logits: Logits = self.decode(batch, progress)[0]
        return logits

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        options: GenerateOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Event]:
        """Stream what follows one prompt or several (texts, or token ids); see `generate`.

        Texts get the tokenizer's own beginning-of-sequence token where it asks for one.
        """
        self._check_open()
        codec = self.codec
        many = [prompts] if isinstance(prompts, str) else prompts
        ids = [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in many]
        return generate(self, ids, options or GenerateOptions(), codec, progress)

    @cached_property
    def codec(self) -> TextCodec | None:
        """The bundle's tokenizer, if it has one."""
        return TextCodec.load(self.folder) if self.manifest.tokenizer else None

    def _encode(self, text: str) -> list[int]:
        if self.codec is None:
            raise ConfigError(
                "this bundle has no tokenizer; give token ids, or export a checkpoint that has "
                "a tokenizer.json"
            )
        return self.codec.encode(text)

    def clear(self, seq_id: int | None = None) -> None:
        """Forget a sequence, or all of them. Its rows need no erasing: no plan reads them."""
        with self._in_use():
            which = range(self.num_sequences) if seq_id is None else [seq_id]
            for seq in which:
                self._check_seq(seq)
            for seq in which:
                self._cells.clear(seq)

    def close(self) -> None:
        """Free session, caches and buffers. Harmless twice."""
        self._is_closed = True
        self._calls.clear()
        self._caches.clear()
        self._session = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run_all(
        self,
        batch: Batch,
        ubatches: Sequence[UBatch],
        progress: Callable[[int, int], None] | None,
    ) -> Logits:
        row_of = np.cumsum(batch.wants_logits) - 1  # row in the result of each wanted token
        count = int(batch.wants_logits.sum())
        result = np.empty((count, self.manifest.vocab_size), np.float32)
        done = 0
        for ubatch in ubatches:
            with interrupts_held():
                plan, logits = self._step(ubatch, done, batch)
            wanted = plan.wanted_rows
            result[row_of[ubatch.source[wanted]]] = logits[: wanted.size]
            done += ubatch.tokens.size
            if progress is not None:
                progress(done, batch.tokens.size)
        return result

    def _step(self, ubatch: UBatch, done: int, batch: Batch) -> tuple[StepPlan, Logits]:
        """Plan, pad, run and commit one ubatch."""
        plan = plan_step(self._sizes, self._cells, ubatch)
        bucket = pick_bucket(self.manifest.planners, self.manifest.ladder, plan)
        call = self._bound(bucket, done)
        self._filler.fill(call.dims, plan, call.arrays)
        for buffer in call.inputs.values():
            self._binder.push(buffer)
        try:
            self._session.run_with_iobinding(call.binding)
        except Exception as error:
            raise self._dropped(ubatch, done, error) from error
        self._cells.commit(plan.reservation)
        if not plan.wanted_rows.size:  # nothing to bring back from the device
            return plan, np.empty((0, self.manifest.vocab_size), np.float32)
        return plan, self._binder.pull(call.results[LOGITS])

    def _dropped(self, ubatch: UBatch, done: int, error: Exception) -> CachegraphError:
        """The graph may have written state rows of these sequences: they are forgotten."""
        for seq in ubatch.streams:
            self._cells.clear(seq)
        kept = {s: n for s, n in self._cells.next_positions().items() if n}
        lengths = ", ".join(f"{s}: {n}" for s, n in kept.items()) or "none"
        return StepError(
            f"a graph call failed after {done} tokens of the batch were in; sequences "
            f"{list(ubatch.streams)} were dropped, tokens held by the others: {lengths}; "
            f"ONNX Runtime says: {str(error).splitlines()[0]}"
        )

    def _bound(self, bucket: Bucket, done: int) -> BoundCall:
        """The bound buffers of a bucket, made at its first use."""
        if bucket not in self._calls:
            dims = self.manifest.dims(bucket)
            try:
                self._calls[bucket] = bind_call(
                    self._session, self._binder, self._contract, self._caches, dims
                )
            except MemoryError as error:
                raise CapacityError(
                    f"no memory for the buffers of bucket {bucket.name}, {done} tokens of the "
                    "batch are in; send fewer tokens at once or ask for fewer logits"
                ) from error
        return self._calls[bucket]

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("this engine is closed; load the bundle again")

    def _check_seq(self, seq_id: int) -> None:
        if not 0 <= seq_id < self.num_sequences:
            raise UsageError(
                f"no sequence {seq_id}; this bundle holds 0 to {self.num_sequences - 1}"
            )

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        self._check_open()
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                "this engine is in use by another thread; use one engine a thread"
            )
        try:
            yield
        finally:
            self._lock.release()
