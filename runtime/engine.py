"""The engine: one bundle, one device, its sequences.

A batch is checked, split and placed whole before its first graph call; from then on each ubatch is
planned, padded, run and committed on its own. Planning is pure and committing comes last, so a step
that was refused leaves no trace. Knows nothing of text: `generate` turns ids into it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.buckets import Bucket
from cachegraph.models.errors import (
    BatchError,
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
    bind_call,
)
from cachegraph.runtime.bundle import open_bundle, verify
from cachegraph.runtime.checkpoints import Checkpoints
from cachegraph.runtime.coupled import decoupled
from cachegraph.runtime.generate import Event, GenerateOptions, generate
from cachegraph.runtime.interrupts import interrupts_held
from cachegraph.runtime.memory import MemoryReport, memory_report
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
from cachegraph.runtime.store import SequenceStore
from cachegraph.runtime.text import TextCodec

Logits = NDArray[np.float32]
LOGITS = "logits"
_LOG = logging.getLogger(__name__)


class Prefill(NamedTuple):
    """Logits after the last token, float32 [vocab]; tokens that were reused, and decoded."""

    logits: Logits
    reused: int
    planned: int


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
        self._store = SequenceStore(manifest, binder)
        self._sizes = StepSizes.of(manifest.planners, self._contract)
        self._filler = Filler(self._contract, manifest.planners)
        self._calls: dict[Bucket, BoundCall] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_verified = False
        self.checkpoints = Checkpoints(
            self._contract,
            manifest.planners,
            binder,
            self._store.caches,
            self._store.table,
            self._in_use,
        )

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        *,
        device: DeviceName = "auto",
        threads: int = 0,
        spinning: bool = True,
        optimization: Optimization = "all",
        memory_budget: int | None = None,
    ) -> Engine:
        """Open a bundle.

        Args:
            bundle: the folder that an export wrote.
            device: auto takes CUDA where ONNX Runtime offers it; cuda without one is an error.
            threads: of one graph call; 0 leaves the choice to ONNX Runtime.
            spinning: whether idle threads burn CPU to answer sooner.
            optimization: disable, basic, extended, layout or all.
            memory_budget: most bytes the caches may take; more is refused before any is allocated.

        Raises ContractError for what is no bundle or needs a newer ONNX Runtime, DependencyError
        where ONNX Runtime is missing, DeviceError, CapacityError.
        """
        folder, manifest = open_bundle(Path(bundle))
        report = memory_report(manifest.contract)
        if memory_budget is not None:
            report.check_budget(memory_budget)
        ort = load_onnxruntime()
        options = SessionOptions(threads=threads, spinning=spinning, optimization=optimization)
        where = pick_device(ort, device)
        session = open_session(ort, folder, manifest, where, options)
        binder: Binder = CpuBinder(ort) if where == "cpu" else CudaBinder(ort)
        engine = cls(folder, manifest, session, binder, where)
        _LOG.info(report.line())
        return engine

    @property
    def provider(self) -> str:
        """The ONNX Runtime execution provider that runs."""
        self._check_open()
        return str(self._session.get_providers()[0])

    @property
    def memory(self) -> MemoryReport:
        """Bytes of the caches and of the prepared checkpoint, by kind, layer and device."""
        return memory_report(self._contract, self.device, self.checkpoints.num_bytes)

    @property
    def num_sequences(self) -> int:
        """How many sequences the caches hold."""
        return self.manifest.capacity.sequences

    def length(self, seq_id: int) -> int:
        """Tokens that a sequence holds: the position it expects next."""
        self._check_open()
        self._store.check_id(seq_id)
        return self._store.table.length(seq_id)

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
            self._check(batch, self._store.table.cells.next_positions())
            batch = decoupled(batch, self._store.table.tokens)
            ubatches = split_batch(batch, self.manifest.ladder)
            if len(ubatches) > 1:  # a single one is checked when it is planned
                self._store.table.cells.check_room(ubatches)
            return self._run_all(batch, ubatches, progress)

    def reserve(self, *, streams: int, step: int, context: int, all_rows: bool = False) -> int:
        """Allocate and bind the buffers of the worst step of this size; returns their bytes.

        The bucket is the one in which blocks of every kind close, so that a step of so many
        streams, tokens per stream and tokens of context finds its buffers there. CapacityError for
        a size beyond the bundle's.
        """
        with self._in_use():
            specs = self.manifest.planners
            bucket = self.manifest.ladder.pick(
                streams=streams,
                step=step,
                context=ceil(context / specs.context_unit),
                closes=tuple(spec.kind for spec in specs.compressors),
                all_rows=all_rows,
            )
            call = self._bound(bucket, 0)
            buffers = (*call.inputs.values(), *call.results.values())
            return sum(buffer.array.nbytes for buffer in buffers)

    def append(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        seq_id: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Logits:
        """Add tokens to a sequence; returns the logits after the last one, float32 [vocab]."""
        start = self.length(seq_id)
        count = len(tokens)
        wanted = np.zeros(count, np.bool_)
        wanted[-1:] = True
        batch = Batch.of(
            tokens, np.arange(start, start + count), [seq_id] * count, logits=wanted
        )
        logits: Logits = self.decode(batch, progress)[0]
        return logits

    def prefill(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        seq_id: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Prefill:
        """Make a sequence hold exactly `tokens`, reusing what it holds already.

        The longest common prefix is kept, back to the nearest position where the sequence can
        stand; at least one token is always decoded, for its logits. BatchError or CapacityError
        before anything has changed.
        """
        ids = [int(token) for token in tokens]
        self._check_open()
        self._store.check_id(seq_id)
        if not ids:
            raise BatchError("prefill needs at least one token; use clear to empty a sequence")
        reused = self._store.table.reusable(seq_id, ids)
        rest = ids[reused:]
        positions = np.arange(reused, len(ids))
        wanted = positions == len(ids) - 1
        batch = Batch.of(rest, positions, [seq_id] * len(rest), logits=wanted)
        self._check(batch, {seq_id: reused})
        self.remove(seq_id, reused)
        return Prefill(self.decode(batch, progress)[0], reused, len(rest))

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

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """The token ids that a sequence holds, by position."""
        self._check_open()
        self._store.check_id(seq_id)
        return self._store.table.tokens(seq_id)

    def positions(self, seq_id: int) -> range:
        """The positions that a sequence holds."""
        return range(self.length(seq_id))

    def reachable(self, seq_id: int) -> tuple[range, ...]:
        """The positions that a sequence can be cut to, as ascending ranges."""
        self._check_open()
        self._store.check_id(seq_id)
        return self._store.table.reachable(seq_id)

    def clear(self, seq_id: int | None = None, *, data: bool = False) -> None:
        """Forget a sequence, or all of them (None or -1).

        Its rows need no erasing, since no plan reads them; `data` zeroes them all the same.
        """
        with self._in_use():
            for seq in range(self.num_sequences) if seq_id in (None, -1) else [seq_id]:
                self._store.clear(seq, data=data)

    def reset(self, seq_id: int) -> None:
        """Forget a sequence and zero its block in every compressed, indexer and state cache.

        Its raw rows become free; no byte of another sequence changes.
        """
        with self._in_use():
            self._store.reset(seq_id)

    def remove(self, seq_id: int, first: int, end: int = -1) -> None:
        """Take tokens back from the end of a sequence: positions `first` to `end` - 1.

        A negative `first` is the start, a negative `end` the end; seq_id -1 means every sequence.
        An empty range changes nothing. RewindError, with nothing changed, for a range that does not
        reach the end (what follows it depends on absolute positions), or where the sequence cannot
        stand at `first`; the reachable positions are named. Copies nothing.
        """
        with self._in_use():
            self._store.remove(seq_id, first, end)

    def copy(self, source: int, target: int) -> int:
        """Make `target` hold what `source` holds; returns the bytes moved.

        What `target` held is replaced. Only live rows are copied. Onto itself it does nothing.
        """
        with self._in_use():
            return self._store.copy(source, target)

    def keep(self, seq_id: int) -> None:
        """Forget every sequence but one."""
        with self._in_use():
            self._store.check_id(seq_id)
            for seq in set(range(self.num_sequences)) - {seq_id}:
                self._store.clear(seq)

    def save(self, path: str | Path, seq_ids: Sequence[int] | None = None) -> int:
        """Save sequences (all that hold tokens by default) to one file; returns its bytes.

        Atomic: an error leaves what was at `path`.
        """
        with self._in_use():
            return self._store.save(Path(path), seq_ids)

    def restore(
        self, path: str | Path, targets: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Restore saved sequences; returns saved id -> slot.

        targets: saved id -> slot; by default every saved sequence into the slot of its id. What a
        slot held is replaced. StateFileError or CapacityError leaves every live row as it was.
        The first restore hashes the weights file: ContractError where it was changed.
        """
        with self._in_use():
            if not self._is_verified:
                verify(self.folder)
                self._is_verified = True
            return self._store.restore(Path(path), targets)

    def shift(self, seq_id: int, first: int, end: int, delta: int) -> None:
        """Refused: block phase and stored rows depend on the absolute position."""
        raise self._fixed_positions("shift")

    def divide(self, seq_id: int, first: int, end: int, divisor: int) -> None:
        """Refused: block phase and stored rows depend on the absolute position."""
        raise self._fixed_positions("divide")

    def _fixed_positions(self, edit: str) -> UsageError:
        return UsageError(
            f"{edit} is not possible for {self.manifest.family}: block phase and stored rows "
            "depend on the absolute position; decode the text again at its new positions"
        )

    def close(self) -> None:
        """Free session, caches and buffers. Harmless twice."""
        self._is_closed = True
        self.checkpoints.close()
        self._calls.clear()
        self._store.caches.clear()
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

    def _check(self, batch: Batch, next_positions: Mapping[int, int]) -> None:
        """`check_batch` with the sizes of this bundle."""
        check_batch(
            batch,
            vocab_size=self.manifest.vocab_size,
            context=self.manifest.capacity.context,
            sequences=self.num_sequences,
            next_positions=next_positions,
        )

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
        plan = plan_step(self._sizes, self._store.table.cells, ubatch)
        bucket = pick_bucket(self.manifest.planners, self.manifest.ladder, plan)
        call = self._bound(bucket, done)
        self._filler.fill(call.dims, plan, call.arrays)
        for buffer in call.inputs.values():
            self._binder.push(buffer)
        try:
            self._session.run_with_iobinding(call.binding)
        except Exception as error:
            raise self._dropped(ubatch, done, error) from error
        self._store.table.commit(plan.reservation, ubatch)
        self.checkpoints.note(ubatch)
        if not plan.wanted_rows.size:  # nothing to bring back from the device
            return plan, np.empty((0, self.manifest.vocab_size), np.float32)
        return plan, self._binder.pull(call.results[LOGITS])

    def _dropped(self, ubatch: UBatch, done: int, error: Exception) -> CachegraphError:
        """The graph may have written state rows of these sequences: they are forgotten."""
        for seq in ubatch.streams:
            self._store.table.clear(seq)
        kept = {s: n for s, n in self._store.table.cells.next_positions().items() if n}
        lengths = ", ".join(f"{s}: {n}" for s, n in kept.items()) or "none"
        return StepError(
            f"a graph call failed after {done} tokens of the batch were in; sequences "
            f"{list(ubatch.streams)} were dropped, tokens held by the others: {lengths}; "
            f"ONNX Runtime says: {(str(error).splitlines() or [repr(error)])[0]}"
        )

    def _bound(self, bucket: Bucket, done: int) -> BoundCall:
        """The bound buffers of a bucket, made at its first use."""
        if bucket not in self._calls:
            dims = self.manifest.dims(bucket)
            try:
                self._calls[bucket] = bind_call(
                    self._session, self._binder, self._contract, self._store.caches, dims
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
