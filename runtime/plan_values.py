"""The logical value of every host row of a step, planner by planner: where names meet plans.

Rows of T come as [s, p, ...], others as the planner made them; padding is `padding.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from cachegraph.models.contract import OUT_ROWS, CacheKind, Contract, RowLayout, RowSharing
from cachegraph.models.errors import PlanError
from cachegraph.models.ngram_spec import IDS
from cachegraph.models.plan_fields import (
    NO_PREVIOUS,
    PADDED_BLOCK,
    CompressorFields,
    RawFields,
    plan_name,
)
from cachegraph.models.planner_specs import CompressorSpec, PlannerSpecs
from cachegraph.models.pooled_fields import PooledFields, pooled_name
from cachegraph.models.pooled_spec import PooledSpec
from cachegraph.models.recurrent_spec import RecurrentFields, recurrent_name
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.planners.compressor import CompressorPlan
from cachegraph.runtime.planners.pool_layout import PoolLayout
from cachegraph.runtime.planners.raw import RawPlan
from cachegraph.runtime.planners.step import StepPlan
from cachegraph.runtime.split import UBatch


class Source(Protocol):
    """The values of one planner's host rows. names: the rows, in the order of `of`."""

    names: tuple[str, ...]

    def of(self, step: StepPlan, dims: Mapping[str, int]) -> Iterable[IntArray]:
        """Values for a bucket of these dims; PlanError where the plan does not fit it."""


def sources(contract: Contract, specs: PlannerSpecs) -> tuple[Source, ...]:
    """The sources that a bundle's planners make."""
    found: list[Source] = [_BatchValues()]
    if specs.raw is not None:
        found.append(_RawValues())
    found += [
        _CompressorValues(spec, contract)
        for spec in specs.compressors
        if contract.has(spec.kind)  # a stage may be without layers of this kind
    ]
    if specs.pooled is not None:
        found.append(_PooledValues(specs.pooled, contract.layout(CacheKind.KEYS)))
    if specs.recurrent is not None:
        found.append(_RecurrentValues())
    if any(row.name == IDS for row in contract.host_rows):
        found.append(_NgramValues())
    return tuple(found)


class _BatchValues:
    names: tuple[str, ...] = ("tokens", "positions", OUT_ROWS)

    def of(self, step: StepPlan, dims: Mapping[str, int]) -> Iterable[IntArray]:
        ubatch, block = step.ubatch, _block(step)
        positions = ubatch.positions if ubatch.places is None else ubatch.places
        yield ubatch.tokens.reshape(block)
        yield positions.reshape(*block, *positions.shape[1:])
        yield _padded_rows(step.wanted_rows, ubatch.step, dims["P"])


class _RawValues:
    names = tuple(plan_name(CacheKind.RAW, field) for field in RawFields._fields)

    def of(self, step: StepPlan, dims: Mapping[str, int]) -> Iterable[IntArray]:
        assert step.raw is not None
        return _raw_fields(step.raw, _block(step))


class _CompressorValues:
    def __init__(self, spec: CompressorSpec, contract: Contract) -> None:
        state = contract.layout(dict(spec.serves)[spec.kind])
        self._table = _Table.of(spec, contract.layout(spec.kind), state)
        named = partial(plan_name, spec.kind)
        self.names = tuple(named(field) for field in CompressorFields._fields)

    def of(self, step: StepPlan, dims: Mapping[str, int]) -> Iterable[IntArray]:
        plan = step.compressors[self._table.spec.kind]
        return _compressor_fields(self._table, plan, step.ubatch, dims)


class _PooledValues:
    """Pools of each stream of the step, and rows counted from the start of the whole cache."""

    names = tuple(pooled_name(field) for field in PooledFields._fields)

    def __init__(self, spec: PooledSpec, layout: RowLayout) -> None:
        self._spec, self._layout = spec, layout

    def of(self, step: StepPlan, dims: Mapping[str, int]) -> Iterable[IntArray]:
        plan, block = step.pooled, _block(step)
        assert plan is not None
        layouts = [plan.layouts[seq] for seq in step.ubatch.streams]
        exposed = max(layout.num_pools for layout in layouts)
        if exposed > dims["NG"]:
            raise PlanError(
                f"pool plan: {exposed} pools are visible, the bucket exposes {dims['NG']}; pick a "
                "larger context rung"
            )
        cells, members = _pools(layouts, self._spec.pool)
        missing = plan.tail_idxs == plan.sentinel
        bases = np.repeat(self._bases(step.ubatch.streams), block[1])[:, None]
        tail = np.where(missing, plan.k_idxs[:, None], plan.tail_idxs + bases)
        return PooledFields(
            k_idxs=plan.k_idxs.reshape(block),
            pool_cells=cells,
            pool_idxs=members,
            n_visible=plan.mask_n.reshape(block),
            tail_idxs=tail.reshape(*block, -1),
            n_tail=(~missing).sum(axis=1).reshape(block),
            new_pool_idxs=plan.new_pool_idxs,
            new_pool_rep=plan.new_pool_rep,
            new_pool_pos=plan.new_pool_pos,
        )

    def _bases(self, streams: Iterable[int]) -> IntArray:
        is_unified = self._layout.sharing is RowSharing.UNIFIED
        return np.array([0 if is_unified else self._layout.base(s) for s in streams])


class _RecurrentValues:
    names = tuple(recurrent_name(field) for field in RecurrentFields._fields)

    def of(self, step: StepPlan, dims: Mapping[str, int]) -> Iterable[IntArray]:
        plan = step.recurrent
        assert plan is not None
        return RecurrentFields(
            state_read_idxs=plan.state_read_idxs,
            state_write_src_idxs=_padded_rows(
                plan.state_write_src_idxs, step.ubatch.step, dims["P"]
            ),
            state_write_dst_idxs=plan.state_write_dst_idxs,
            n_tokens=plan.n_tokens,
        )


class _NgramValues:
    names: tuple[str, ...] = (IDS,)

    def of(self, step: StepPlan, dims: Mapping[str, int]) -> Iterable[IntArray]:
        assert step.ngram_ids is not None
        return (step.ngram_ids.reshape(*_block(step), -1),)


def _block(step: StepPlan) -> tuple[int, int]:
    """[s, p] of a step."""
    return len(step.ubatch.streams), step.ubatch.step


def _pools(layouts: list[PoolLayout], size: int) -> tuple[IntArray, IntArray]:
    """Keys' rows [s, n] and members' rows [s, n * size] of the longest stream's pools.

    Shorter lists repeat a row of their own sequence, which every stream of a step has.
    """
    most = max(1, *(layout.num_pools for layout in layouts))
    if len(layouts) == 1 and layouts[0].num_pools == most:
        return layouts[0].reps[None], layouts[0].members(size).reshape(1, -1)
    cells = np.empty((len(layouts), most), np.int64)
    members = np.empty((len(layouts), most * size), np.int64)
    for place, layout in enumerate(layouts):
        count = layout.num_pools
        cells[place], members[place] = layout.rows[-1], layout.rows[-1]
        cells[place, :count] = layout.reps
        members[place, : count * size] = layout.members(size).ravel()
    return cells, members


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
