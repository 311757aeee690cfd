"""Padding: logical plans become the fixed-size buffers of one bucket.

Every element of every host row is written in every step; what the unused part holds follows from
the row's padding rule and its cache layout, never from its name. The one table of names is
`Filler.values`. Knows nothing of how plans are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.contract import (
    OUT_ROWS,
    CacheKind,
    Contract,
    Padding,
    RowLayout,
    TensorRow,
)
from cachegraph.models.errors import ContractError, PlanError
from cachegraph.models.plan_fields import (
    NO_PREVIOUS,
    PADDED_BLOCK,
    CompressorFields,
    RawFields,
    plan_name,
)
from cachegraph.models.planner_specs import CompressorSpec, PlannerSpecs
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.planners.compressor import CompressorPlan
from cachegraph.runtime.planners.raw import RawPlan
from cachegraph.runtime.planners.step import StepPlan
from cachegraph.runtime.split import UBatch

Rows = NDArray[np.float32]
_BATCH = ("tokens", "positions", OUT_ROWS)
_TOKENS = ("T",)  # rows of this shape are stream-major: they are filled as [S, P]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """How one host row is padded. filler: first spare row, sentinel row, or 0."""

    name: str
    rule: Padding
    is_tokens: bool
    filler: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    """The source table of a compressor: all sentinels of its state rows, then carried ring rows.

    columns: 0 .. compressed rows of a stream - 1. live_rows: ring rows of all streams.
    sentinels: their state rows. no_previous, padded_block: their entries in the table.
    """

    spec: CompressorSpec
    columns: IntArray
    live_rows: int
    sentinels: IntArray
    no_previous: int
    padded_block: int

    @classmethod
    def of(cls, spec: CompressorSpec, rows: RowLayout, state: RowLayout) -> _Table:
        names = state.sentinels
        return cls(
            spec=spec,
            columns=np.arange(rows.rows_per_stream),
            live_rows=state.live_rows,
            sentinels=state.live_rows + np.arange(len(names)),
            no_previous=names.index(NO_PREVIOUS) if NO_PREVIOUS in names else 0,
            padded_block=names.index(PADDED_BLOCK),
        )


class Filler:
    """Fills the plan buffers of a contract. Made once; keeps nothing of a step."""

    def __init__(self, contract: Contract, specs: PlannerSpecs) -> None:
        self._slots = tuple(_slot(contract, row) for row in contract.host_rows)
        self._tables = {
            spec.kind: _Table.of(
                spec, contract.layout(spec.kind), contract.layout(dict(spec.serves)[spec.kind])
            )
            for spec in specs.compressors
            if contract.has(spec.kind)  # a stage may be without layers of this kind
        }
        self._raw_names = [plan_name(CacheKind.RAW, field) for field in RawFields._fields]
        self._names = {
            kind: [plan_name(kind, field) for field in CompressorFields._fields]
            for kind in self._tables
        }
        named = {
            *_BATCH,
            *self._raw_names,
            *(n for names in self._names.values() for n in names),
        }
        found = {slot.name for slot in self._slots}
        unknown = (named ^ found) - {OUT_ROWS}  # a stage without a head has none
        if unknown:
            raise ContractError(
                f"host rows without a planner, or the reverse: {sorted(unknown)}"
            )

    def fill(
        self, dims: Mapping[str, int], step: StepPlan, buffers: Mapping[str, IntArray]
    ) -> None:
        """Write every element of every host row.

        dims: those of the chosen bucket. buffers: int64 by contract name, contiguous, of the shapes
        that the contract gives for these dims. PlanError where the plan does not fit the bucket.
        """
        size = (dims["S"], dims["P"])
        values = dict(self.values(dims, step))
        for slot in self._slots:
            buffer = buffers[slot.name]
            view = buffer.reshape(size) if slot.is_tokens else buffer
            value = values[slot.name]
            if view.shape == value.shape:
                view[...] = value
            elif view.ndim == 1:
                _pad_list(slot, view, value)
            else:
                _pad_block(slot, view, value)

    def values(
        self, dims: Mapping[str, int], step: StepPlan
    ) -> Iterator[tuple[str, IntArray]]:
        """The logical value of every host row; rows of T as [s, p]."""
        ubatch = step.ubatch
        block = (len(ubatch.streams), ubatch.step)
        out_rows = _padded_rows(step.wanted_rows, ubatch.step, dims["P"])
        batch = (ubatch.tokens.reshape(block), ubatch.positions.reshape(block), out_rows)
        yield from zip(_BATCH, batch, strict=True)
        yield from zip(self._raw_names, _raw_fields(step.raw, block), strict=True)
        for kind, table in self._tables.items():
            fields = _compressor_fields(table, step.compressors[kind], ubatch, dims)
            yield from zip(self._names[kind], fields, strict=True)


def fill(
    contract: Contract,
    specs: PlannerSpecs,
    dims: Mapping[str, int],
    step: StepPlan,
    buffers: Mapping[str, IntArray],
) -> None:
    """`Filler.fill` for a single call; make a `Filler` where there are many."""
    Filler(contract, specs).fill(dims, step, buffers)


def fill_rows(buffer: Rows, rows: Rows, step: int, padded_step: int) -> None:
    """Place rows [S*p, width] of a ubatch in a buffer [S*P, width]; padded lanes hold zeros."""
    lanes = buffer.reshape(-1, padded_step, buffer.shape[1])
    block = rows.reshape(-1, step, rows.shape[1])
    lanes[: len(block), :step] = block
    lanes[: len(block), step:] = 0
    lanes[len(block) :] = 0


def _slot(contract: Contract, row: TensorRow) -> _Slot:
    filler = 0
    if row.spare_of is not None:
        layout = contract.layout(row.spare_of)
        is_spare = row.padding is Padding.SPARE
        filler = layout.spare_start if is_spare else layout.sentinel(PADDED_BLOCK)
    is_tokens = row.shape == _TOKENS
    return _Slot(name=row.name, rule=row.padding, is_tokens=is_tokens, filler=filler)


def _padded_rows(entries: IntArray, step: int, padded_step: int) -> IntArray:
    """Rows of T for ubatch entries: token i of stream s moves from s*p + i to s*P + i."""
    if step == padded_step:
        return entries
    return entries + entries // step * (padded_step - step)


def _raw_fields(plan: RawPlan, block: tuple[int, int]) -> RawFields[IntArray]:
    """Ragged reads become [s, longest]: a short list repeats its last row, at position 0."""
    counts = plan.read_counts
    if block[0] == 1:
        reads, held = plan.read_idxs[None], plan.read_pos[None]
    else:
        columns = np.arange(counts.max())
        starts = np.cumsum(counts) - counts
        index = np.minimum(columns, counts[:, None] - 1) + starts[:, None]
        reads = plan.read_idxs[index]
        held = np.where(columns < counts[:, None], plan.read_pos[index], 0)
    writes = plan.write_idxs.reshape(block)
    return RawFields(write_idxs=writes, read_idxs=reads, read_pos=held, read_counts=counts)


def _compressor_fields(
    table: _Table, plan: CompressorPlan, ubatch: UBatch, dims: Mapping[str, int]
) -> CompressorFields[IntArray]:
    block = (len(ubatch.streams), ubatch.step)
    suffix = table.spec.suffix
    old, read = _windows(table, plan, ubatch.step, dims)
    kept = _padded_rows(plan.state_persist_src_idxs, ubatch.step, dims["P"])
    exposed = dims["N" + suffix]
    if plan.num_exposed > exposed:
        raise PlanError(
            f"{table.spec.kind.value} plan: {plan.num_exposed} rows are visible, the bucket "
            f"exposes {exposed}; pick a larger context rung"
        )
    bases = np.array(ubatch.streams)[:, None] * table.columns.size
    return CompressorFields(
        state_pos=plan.state_pos.reshape(block),
        state_old_idxs=old,
        state_read_idxs=read,
        state_persist_src_idxs=dims["A" + suffix] + kept,
        state_persist_dst_idxs=plan.state_persist_dst_idxs,
        state_write_idxs=plan.state_write_idxs,
        state_write_pos=plan.state_write_pos,
        n_visible=plan.n_visible.reshape(block),
        rows=bases + table.columns[:exposed],
    )


def _windows(
    table: _Table, plan: CompressorPlan, step: int, dims: Mapping[str, int]
) -> tuple[IntArray, IntArray]:
    """State rows carried [a], and the windows in source-table rows [B, window].

    Padded blocks read the padded-block sentinel, which like all sentinels stands in front of the
    ring rows that the windows need.
    """
    spec, count = table.spec, plan.num_blocks
    blocks, carried = dims["B" + spec.suffix], dims["A" + spec.suffix]
    if count > blocks:
        raise PlanError(
            f"{spec.kind.value} plan: {count} blocks close, the bucket has room for {blocks}; "
            "pick a bucket whose `closes` names the kind"
        )
    if not blocks:
        return table.sentinels[:0], np.zeros((0, spec.window), np.int64)
    read = np.full((blocks, spec.window), table.padded_block, np.int64)
    if not count:
        return table.sentinels, read
    flat = plan.state_read_idxs
    is_ring = flat < table.live_rows
    old, places = np.unique(flat[is_ring], return_inverse=True)
    source = carried + _padded_rows(flat - table.live_rows, step, dims["P"])
    source[is_ring] = table.sentinels.size + places
    source[flat == table.live_rows + plan.state_pos.size] = table.no_previous
    parts = source.reshape(
        -1, count, spec.ratio
    )  # previous windows (with overlap), current ones
    read[:count] = parts.swapaxes(0, 1).reshape(count, spec.window)
    return np.concatenate((table.sentinels, old)), read


def _pad_list(slot: _Slot, view: IntArray, value: IntArray) -> None:
    count = value.size
    if count > view.size:
        _too_large(slot, view, value)
    view[:count] = value
    tail = view[count:]
    if slot.rule is Padding.SPARE:
        tail[...] = np.arange(slot.filler, slot.filler + tail.size)
    elif slot.rule is Padding.LAST:
        tail[...] = value[-1] if count else 0
    elif slot.rule in (Padding.ZERO, Padding.SENTINEL):
        tail[...] = slot.filler
    else:
        _too_large(slot, view, value)


def _pad_block(slot: _Slot, view: IntArray, value: IntArray) -> None:
    """Pad on the right of each stream's entries, then whole streams below."""
    rows, columns = value.shape
    if rows > view.shape[0] or columns > view.shape[1]:
        _too_large(slot, view, value)
    view[:rows, :columns] = value
    right, below = view[:rows, columns:], view[rows:]
    if slot.rule is Padding.SPARE:
        first = slot.filler + right.size
        right[...] = np.arange(slot.filler, first).reshape(right.shape)
        below[...] = np.arange(first, first + below.size).reshape(below.shape)
    elif slot.rule is Padding.LAST:
        right[...] = value[:, -1:]
        below[...] = view[rows - 1]
    elif slot.rule in (Padding.ZERO, Padding.SENTINEL):
        right[...] = slot.filler
        below[...] = slot.filler
    else:
        _too_large(slot, view, value)


def _too_large(slot: _Slot, view: IntArray, value: IntArray) -> NoReturn:
    raise PlanError(
        f"{slot.name}: the plan has {value.shape} entries, the bucket {view.shape}; "
        "a larger bucket is needed"
    )
