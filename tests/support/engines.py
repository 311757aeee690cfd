"""Engines driven and watched by tests: what each graph call was given, did, and how it may fail.

`text` fixes the token of every (sequence, position), so that runs in any split can be compared.
Reaches into an engine's filler, session and caches, which nothing but a test may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.bundles import Bundles, open_engine

from cachegraph.models.contract import CacheKind, CacheSpec
from cachegraph.models.manifest import Manifest
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.planners.step import StepPlan

Arrays = dict[str, NDArray[Any]]
_WRITES = {
    CacheKind.RAW: "plan.raw.write_idxs",
    CacheKind.CSA: "plan.csa.state_write_idxs",
    CacheKind.LID: "plan.csa.state_write_idxs",
    CacheKind.HCA: "plan.hca.state_write_idxs",
    CacheKind.CSA_STATE: "plan.csa.state_persist_dst_idxs",
    CacheKind.LID_STATE: "plan.csa.state_persist_dst_idxs",
    CacheKind.HCA_STATE: "plan.hca.state_persist_dst_idxs",
}


class Engines:
    """Engines by bundle, opened at their first use and closed together."""

    def __init__(self, bundles: Bundles) -> None:
        self._bundles = bundles
        self._open: dict[Path, Engine] = {}

    def get(
        self, name: str = "mixed", *, sizes: Mapping[str, int] | None = None, **choices: Any
    ) -> Engine:
        """An engine of a tiny model and export choices, with every sequence forgotten.

        sizes: fields of the model's config to replace.
        """
        checkpoint = self._bundles.checkpoint(name, **(sizes or {}))
        bundle = self._bundles.bundle(checkpoint, **choices)
        if bundle not in self._open:
            self._open[bundle] = open_engine(bundle)
        self._open[bundle].clear()
        return self._open[bundle]

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in self._open.values():
            engine.close()


@dataclass(frozen=True, kw_only=True)
class Call:
    """One graph call: its plan, and the buffers that the graph is about to read (live)."""

    dims: Mapping[str, int]
    plan: StepPlan
    arrays: Mapping[str, NDArray[np.int64]]

    def written(self, spec: CacheSpec) -> NDArray[np.int64]:
        """Rows of a cache that the plan names as scatter targets, spare rows included."""
        return self.arrays[_WRITES[spec.kind]].copy()

    @property
    def padded_lanes(self) -> NDArray[np.bool_]:
        """[S, P], true where no real token sits."""
        lanes = np.full((self.dims["S"], self.dims["P"]), True)
        lanes[: len(self.plan.ubatch.streams), : self.plan.ubatch.step] = False
        return lanes


Hook = Callable[[Call], None]


def _nothing(call: Call) -> None:
    pass


@contextmanager
def watched(
    engine: Engine, *, before: Hook = _nothing, after: Hook = _nothing
) -> Iterator[list[Call]]:
    """Hooks around every graph call. `before` sees filled buffers and may change them or raise."""
    calls: list[Call] = []
    graph = engine._graph
    filler, session = graph._filler, graph.session

    class Filler:
        def fill(self, dims: Any, plan: StepPlan, arrays: Any) -> None:
            filler.fill(dims, plan, arrays)
            calls.append(Call(dims=dims, plan=plan, arrays=arrays))

    class Session:
        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

        def run_with_iobinding(self, binding: Any) -> None:
            before(calls[-1])
            session.run_with_iobinding(binding)
            after(calls[-1])

    graph._filler, graph.session = Filler(), Session()  # type: ignore[assignment]
    try:
        yield calls
    finally:
        graph._filler = filler
        if not engine._is_closed:
            graph.session = session


def text(seq: int, start: int, count: int, vocab: int) -> list[int]:
    """Tokens at positions start .. start + count - 1 of the one text of a sequence."""
    whole = np.random.default_rng([seq, 5]).integers(vocab, size=256)
    assert start + count <= whole.size
    return [int(token) for token in whole[start : start + count]]


def batch_of(
    engine: Engine, counts: Mapping[int, int], *, texts: Mapping[int, int] | None = None
) -> Batch:
    """The next tokens of some sequences, all with logits. texts: whose text a sequence gets."""
    tokens: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    for seq, count in counts.items():
        start = engine.length(seq)
        source = (texts or {}).get(seq, seq)
        tokens += text(source, start, count, engine.manifest.vocab_size)
        positions += range(start, start + count)
        owners += [seq] * count
    return Batch.of(tokens, positions, owners, logits=[True] * len(tokens))


def feed(
    engine: Engine, counts: Mapping[int, int], *, texts: Mapping[int, int] | None = None
) -> dict[int, NDArray[np.float32]]:
    """Decode the next tokens of some sequences: [count, vocab] logits of each."""
    rows = engine.decode(batch_of(engine, counts, texts=texts))
    ends = np.cumsum(list(counts.values()))[:-1]
    return dict(zip(counts, np.split(rows, ends), strict=True))


def cold(
    engine: Engine, seq: int, chunks: Sequence[int], *, source: int | None = None
) -> NDArray[np.float32]:
    """Logits of a text fed alone into a forgotten sequence, chunk after chunk."""
    engine.clear(seq)
    whose = {seq: seq if source is None else source}
    rows = [feed(engine, {seq: n}, texts=whose)[seq] for n in chunks]
    return np.concatenate(rows) if rows else np.zeros((0, engine.manifest.vocab_size))


def snapshot(engine: Engine) -> Arrays:
    """A copy of every row of every cache."""
    return {name: buffer.array.copy() for name, buffer in engine._store.caches.items()}


def changed_rows(spec: CacheSpec, before: Arrays, after: Arrays) -> set[int]:
    """Rows of a cache that differ in any bit."""
    old, new = before[spec.name], after[spec.name]
    differs = old.view(np.uint8) != new.view(np.uint8)
    return set(np.flatnonzero(differs.any(axis=1)).tolist())


def same_bits(before: Arrays, after: Arrays) -> bool:
    """Whether two snapshots agree in every bit."""
    return all(rows.tobytes() == after[name].tobytes() for name, rows in before.items())


def poison_spare(engine: Engine, value: float) -> None:
    """Fill every spare row of every cache."""
    for spec in engine.manifest.contract.caches:
        engine._store.caches[spec.name].array[spec.layout.spare_start :] = value


def poison_inputs(engine: Engine) -> None:
    """Fill every plan buffer of every bucket used so far with nonsense."""
    for call in engine._graph.calls.values():
        for buffer in call.inputs.values():
            buffer.array[...] = -987_654_321


def poison_results(engine: Engine) -> None:
    """Fill the result buffers of every bucket used so far with NaN."""
    for call in engine._graph.calls.values():
        for buffer in call.results.values():
            buffer.array[...] = np.nan


def with_ladder(manifest: Manifest, **rungs: tuple[int, ...]) -> Manifest:
    """The manifest with some rungs of its ladder replaced."""
    return manifest.model_copy(update={"ladder": replace(manifest.ladder, **rungs)})
