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
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.contract import EMBEDDINGS, LOGITS, STREAMS
from cachegraph.models.errors import (
    BatchError,
    ConfigError,
    UsageError,
)
from cachegraph.models.manifest import Manifest
from cachegraph.runtime.batch import Batch, check_batch
from cachegraph.runtime.binding import BoundCall
from cachegraph.runtime.bundle import open_bundle, verify
from cachegraph.runtime.checkpoints import Checkpoints
from cachegraph.runtime.continuation import Event, GenerateOptions
from cachegraph.runtime.coupled import decoupled
from cachegraph.runtime.drafter import Drafter
from cachegraph.runtime.generate import generate
from cachegraph.runtime.memory import MemoryReport, memory_report
from cachegraph.runtime.opening import OpenGraphs, open_graphs
from cachegraph.runtime.ort import (
    DeviceName,
    Optimization,
    SessionOptions,
    load_onnxruntime,
)
from cachegraph.runtime.split import UBatch, split_batch
from cachegraph.runtime.stages import graph_of
from cachegraph.runtime.steps import StepRunner
from cachegraph.runtime.store import SequenceStore
from cachegraph.runtime.text import TextCodec

Logits = NDArray[np.float32]
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
        graphs: OpenGraphs,
    ) -> None:
        """Use `Engine.load`. Allocates every cache; nothing is kept where one cannot be had."""
        self.folder = folder
        self.manifest = manifest
        self.device = graphs.stages[0].device
        self.devices = graphs.devices
        self._contract = manifest.contract
        self._store = SequenceStore(manifest, graphs.stages)
        results = {LOGITS, EMBEDDINGS}
        if graphs.draft is not None:
            self._store.drafter = Drafter.open(manifest, graphs.draft, self._store.table)
            results.add(STREAMS)
        self._graph = graph_of(graphs.stages, manifest.planners, self._store.caches, results)
        self._steps = StepRunner(manifest, self._graph, self._store.table, self._committed)
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_verified = False
        self.checkpoints = Checkpoints(
            self._contract,
            manifest.planners,
            self._store.binder,
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
        draft: bool = False,
    ) -> Engine:
        """Open a bundle.

        Args:
            bundle: the folder that an export wrote.
            device: auto takes CUDA where ONNX Runtime offers it; cuda without one is an error. The
                stages of a split bundle then run where the manifest says; cpu or cuda:1 means all.
            threads: of one graph call; 0 leaves the choice to ONNX Runtime.
            spinning: whether idle threads burn CPU to answer sooner.
            optimization: disable, basic, extended, layout or all.
            memory_budget: most bytes the caches may take; more is refused before any is allocated.
            draft: open the draft graph too, so that `draft` may be called. It holds raw rows and a
                session of its own.

        Raises ContractError for what is no bundle or needs a newer ONNX Runtime, DependencyError
        where ONNX Runtime is missing, DeviceError, CapacityError.
        """
        folder, manifest = open_bundle(Path(bundle), draft=draft)
        report = memory_report(manifest.contract, draft=manifest.draft if draft else None)
        if memory_budget is not None:
            report.check_budget(memory_budget)
        ort = load_onnxruntime()
        options = SessionOptions(threads=threads, spinning=spinning, optimization=optimization)
        graphs = open_graphs(ort, folder, manifest, device, options, draft=draft)
        engine = cls(folder, manifest, graphs)
        _LOG.info(report.line())
        return engine

    @property
    def provider(self) -> str:
        """The ONNX Runtime execution provider that runs."""
        self._check_open()
        return self._graph.providers[0]

    @property
    def memory(self) -> MemoryReport:
        """Bytes of the caches and of the prepared checkpoint, by kind, layer and device."""
        return memory_report(
            self._contract,
            self.devices,
            self.checkpoints.by_layer,
            self.manifest.draft if self.can_draft else None,
        )

    @property
    def num_sequences(self) -> int:
        """How many sequences the caches hold."""
        return self.manifest.capacity.sequences

    @property
    def can_draft(self) -> bool:
        """Whether `draft` may be called."""
        return self._store.drafter is not None

    def draft(
        self,
        pending: Mapping[int, int],
        count: int | Mapping[int, int],
        choose: Callable[[int, NDArray[Any]], int],
    ) -> dict[int, list[int]]:
        """Draft what may follow sequences; returns up to `count` token ids for each.

        Args:
            pending: the token that follows each sequence, chosen and not decoded yet.
            count: tokens to draft, for all sequences or by id; 1 to the rewind budget.
            choose: called for every draft with the sequence and its draft logits, float32
                [vocab], a copy that nothing overwrites; returns the token's id.

        What is drafted binds nobody: decode `pending` and the drafts behind it, and `remove` those
        that you reject. A sequence whose newest streams are not known (none decoded since it was
        restored from an engine that did not draft) gets none. UsageError where the engine was
        opened without drafting; BatchError, ConfigError or CapacityError for what cannot be asked.
        """
        with self._in_use():
            if self._store.drafter is None:
                raise UsageError(
                    "this engine cannot draft; load a bundle that has a draft block with draft=True"
                )
            for seq_id in pending:
                self._store.check_id(seq_id)
            counts = count if isinstance(count, Mapping) else dict.fromkeys(pending, count)
            return self._store.drafter.draft(pending, counts, choose)

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
        return self._run(batch, LOGITS, progress)

    def embed(
        self, batch: Batch, progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float32]:
        """Like `decode`, but returns the final normed hidden states, float32 [n, hidden size].

        They are what the head turns into logits; a row for each token that wants logits.
        """
        return self._run(batch, EMBEDDINGS, progress)

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
            return self._graph.bound(bucket).num_bytes

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
        self._graph.close()
        self._store.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self, batch: Batch, result: str, progress: Callable[[int, int], None] | None
    ) -> NDArray[np.float32]:
        with self._in_use():
            self._check(batch, self._store.table.cells.next_positions())
            batch = decoupled(batch, self._store.table.tokens)
            ubatches = split_batch(batch, self.manifest.ladder)
            if len(ubatches) > 1:  # a single one is checked when it is planned
                self._store.table.cells.check_room(ubatches)
            return self._steps.run(batch, ubatches, result, progress)

    def _committed(self, ubatch: UBatch, call: BoundCall) -> None:
        """Tell those who remember more of a step than the sequence table does."""
        self.checkpoints.note(ubatch)
        if self._store.drafter is not None:
            fetch = partial(self._graph.result, call, STREAMS)
            self._store.drafter.note(ubatch, fetch, call.dims["P"])

    def _check(self, batch: Batch, next_positions: Mapping[int, int]) -> None:
        """`check_batch` with the sizes of this bundle."""
        check_batch(
            batch,
            vocab_size=self.manifest.vocab_size,
            context=self.manifest.capacity.context,
            sequences=self.num_sequences,
            next_positions=next_positions,
        )

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
