"""The engine: one bundle, one device, its sequences.

A batch is checked, split and placed whole before its first graph call; from then on each ubatch is
planned, padded, run and committed on its own. Planning is pure and committing comes last, so a step
that was refused leaves no trace. Knows nothing of text: `generate` turns ids into it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from cachegraph.runtime.bundle import open_bundle
from cachegraph.runtime.checkpoints import Checkpoints
from cachegraph.runtime.continuation import Event, GenerateOptions
from cachegraph.runtime.coupled import decoupled
from cachegraph.runtime.drafter import Drafter
from cachegraph.runtime.edits import SequenceEdits
from cachegraph.runtime.generate import generate
from cachegraph.runtime.memory import MemoryReport, memory_report
from cachegraph.runtime.ngram_tables import NgramTables
from cachegraph.runtime.opening import OpenGraphs, open_graphs
from cachegraph.runtime.ort import (
    DeviceName,
    Optimization,
    SessionOptions,
    load_onnxruntime,
)
from cachegraph.runtime.sequences import SequenceTable
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


class Engine(SequenceEdits):
    """Runs one bundle. Not for several threads at once: concurrent use raises UsageError."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        graphs: OpenGraphs,
    ) -> None:
        """Use `Engine.load`. Allocates every cache; nothing is kept where one cannot be had."""
        super().__init__(folder, manifest, SequenceStore(manifest, graphs.stages))
        self.device = graphs.stages[0].device
        self.devices = graphs.devices
        self._contract = manifest.contract
        results = {LOGITS, EMBEDDINGS}
        if graphs.draft is not None:
            self._store.drafter = Drafter.open(manifest, graphs.draft, self._store.table)
            results.add(STREAMS)
        tables = NgramTables.open(folder, manifest)
        self._graph = graph_of(
            graphs.stages, manifest.planners, self._store.caches, results, tables
        )
        self._steps = StepRunner(manifest, self._graph, self._store.table, self._committed)
        self._checkpoints = self._open_checkpoints()

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

    def _open_checkpoints(self) -> Checkpoints | None:
        """None where memory keeps earlier states itself."""
        table, store = self._store.table, self._store
        if not isinstance(table, SequenceTable):
            return None
        return Checkpoints(
            self._contract,
            self.manifest.planners,
            store.binder,
            store.caches,
            table,
            self._in_use,
        )

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of state rings; UsageError for a family that has none."""
        if self._checkpoints is None:
            raise UsageError(
                f"{self.manifest.family} keeps earlier states of each sequence itself, up to the "
                "rewind budget; take tokens back with remove or rewind"
            )
        return self._checkpoints

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
            {} if self._checkpoints is None else self._checkpoints.by_layer,
            self.manifest.draft if self.can_draft else None,
        )

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
        start = self.following(seq_id)
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
        self._check(batch, {seq_id: reused}, {seq_id: reused})
        self.rewind(seq_id, reused)
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

    def close(self) -> None:
        """Free session, caches and buffers. Harmless twice."""
        self._is_closed = True
        if self._checkpoints is not None:
            self._checkpoints.close()
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
            table = self._store.table
            self._check(batch, table.next_positions(), {s: table.length(s) for s in table.ids})
            if table.has_places:
                batch = batch.placed()
            batch = decoupled(batch, table.text)
            ubatches = split_batch(batch, self.manifest.ladder)
            table.check_room(ubatches)
            return self._steps.run(batch, ubatches, result, progress)

    def _committed(self, ubatch: UBatch, call: BoundCall) -> None:
        """Tell those who remember more of a step than the sequence table does."""
        if self._checkpoints is not None:
            self._checkpoints.note(ubatch)
        if self._store.drafter is not None:
            fetch = partial(self._graph.result, call, STREAMS)
            self._store.drafter.note(ubatch, fetch, call.dims["P"])

    def _check(
        self, batch: Batch, next_positions: Mapping[int, int], lengths: Mapping[int, int]
    ) -> None:
        """`check_batch` with the sizes of this bundle."""
        check_batch(
            batch,
            vocab_size=self.manifest.vocab_size,
            context=self.manifest.capacity.context,
            sequences=self.num_sequences,
            next_positions=next_positions,
            lengths=lengths,
            rule=self.manifest.position_rule,
        )
