"""The plans of a made-up prompt, from a manifest alone: what `cachegraph plan` shows.

Runs the host side of an engine (split, planners, bucket, padding) without a session. Knows nothing
of how the answer is printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cachegraph.models.buckets import Bucket
from cachegraph.models.contract import CacheKind, Contract, RowLayout
from cachegraph.models.errors import ConfigError
from cachegraph.models.manifest import Manifest
from cachegraph.models.plan_fields import CompressorFields, RawFields, plan_name
from cachegraph.models.planner_specs import PlannerSpecs
from cachegraph.models.pooled_fields import PooledFields, pooled_name
from cachegraph.models.recurrent_spec import RecurrentFields, recurrent_name
from cachegraph.runtime.batch import Batch, IntArray, check_batch
from cachegraph.runtime.padding import Filler
from cachegraph.runtime.planners.step import StepPlan, pick_bucket
from cachegraph.runtime.split import split_batch
from cachegraph.runtime.store import memory_of


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """Rows of every cache of a kind that one call touches, ascending.

    written: rows of sequences. spare: padding of the writes. read: rows of sequences and
    sentinels, of which a mask may hide some.
    """

    kind: CacheKind
    written: IntArray
    spare: IntArray
    read: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class CallReport:
    """One graph call. logical, padded: every host row, before and after padding."""

    plan: StepPlan
    bucket: Bucket
    dims: Mapping[str, int]
    logical: Mapping[str, IntArray]
    padded: Mapping[str, IntArray]
    caches: tuple[CacheUse, ...]

    @property
    def num_blocks(self) -> dict[CacheKind, int]:
        """Blocks that close, for each compressor."""
        return {kind: plan.num_blocks for kind, plan in self.plan.compressors.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step of the prompt: the tokens each sequence gets, and the calls that take them."""

    tokens: int
    calls: tuple[CallReport, ...]


def plan_steps(
    manifest: Manifest, sizes: Sequence[int], sequences: int
) -> Iterator[StepReport]:
    """Plan steps of `sizes` tokens for each of `sequences` sequences; positions go on.

    Tokens are made up; the last one of each sequence and step wants logits. ConfigError where the
    bundle holds fewer sequences, CapacityError where the context ends before the steps do.
    """
    held = manifest.capacity.sequences
    if not 1 <= sequences <= held:
        raise ConfigError(f"--sequences is {sequences}; this bundle holds 1 to {held}")
    host = _Host(manifest)
    for size in sizes:
        yield host.step(size, sequences)


class _Host:
    """The host half of an engine."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._contract = manifest.contract
        self._memory = memory_of(manifest)
        self._filler = Filler(self._contract, manifest.planners)

    def step(self, size: int, sequences: int) -> StepReport:
        manifest = self._manifest
        memory = self._memory
        starts = {seq: memory.following(seq) for seq in memory.ids}
        owners = np.repeat(np.arange(sequences), size).tolist()
        tokens = np.arange(size * sequences) % manifest.vocab_size
        batch = Batch.of(tokens, None, owners, starts=starts)
        check_batch(
            batch,
            vocab_size=manifest.vocab_size,
            context=manifest.capacity.context,
            sequences=manifest.capacity.sequences,
            next_positions=starts,
            rule=manifest.position_rule,
        )
        if memory.has_places:
            batch = batch.placed()
        calls = []
        for ubatch in split_batch(batch, manifest.ladder):
            plan = memory.plan(ubatch)
            calls.append(self._call(plan))
            memory.commit(plan)
        return StepReport(tokens=size, calls=tuple(calls))

    def _call(self, plan: StepPlan) -> CallReport:
        manifest = self._manifest
        bucket = pick_bucket(manifest.planners, manifest.ladder, plan)
        dims = manifest.dims(bucket)
        padded = {
            row.name: np.empty(row.resolve(dims), np.int64) for row in self._contract.host_rows
        }
        self._filler.fill(dims, plan, padded)
        return CallReport(
            plan=plan,
            bucket=bucket,
            dims=dims,
            logical=self._logical(dims, plan),
            padded=padded,
            caches=tuple(_cache_uses(self._contract, manifest.planners, padded)),
        )

    def _logical(self, dims: Mapping[str, int], plan: StepPlan) -> dict[str, IntArray]:
        """Every host row as the planners mean it; windows come padded and are cut here."""
        values = dict(self._filler.values(dims, plan))
        for kind, compressor in plan.compressors.items():
            name = plan_name(kind, "state_read_idxs")
            values[name] = values[name][: compressor.num_blocks]
        return values


def _cache_uses(
    contract: Contract, specs: PlannerSpecs, padded: Mapping[str, IntArray]
) -> Iterator[CacheUse]:
    """What the padded plan makes each kind of cache write and read."""
    if specs.raw is not None:
        raw = RawFields(*(padded[plan_name(CacheKind.RAW, f)] for f in RawFields._fields))
        yield _use(contract, CacheKind.RAW, raw.write_idxs, raw.read_idxs)
    for spec in specs.compressors:
        names = (plan_name(spec.kind, field) for field in CompressorFields._fields)
        plan = CompressorFields(*(padded[name] for name in names))
        for kind, state in spec.serves:
            yield _use(contract, kind, plan.state_write_idxs, plan.rows)
            yield _use(contract, state, plan.state_persist_dst_idxs, plan.state_old_idxs)
    if specs.pooled is not None:
        pools = PooledFields(*(padded[pooled_name(f)] for f in PooledFields._fields))
        attended = np.concatenate((pools.pool_idxs.ravel(), pools.tail_idxs.ravel()))
        for kind in (CacheKind.KEYS, CacheKind.VALUES):
            yield _use(contract, kind, pools.k_idxs, attended)
        yield _use(contract, CacheKind.INDEX, pools.k_idxs, pools.new_pool_idxs)
        yield _use(contract, CacheKind.POOLED, pools.new_pool_rep, pools.pool_cells)
    if specs.recurrent is not None:
        states = RecurrentFields(*(padded[recurrent_name(f)] for f in RecurrentFields._fields))
        for kind in dict.fromkeys(c.kind for c in contract.caches if c.kind.is_recurrent):
            yield _use(contract, kind, states.state_write_dst_idxs, states.state_read_idxs)


def _use(contract: Contract, kind: CacheKind, writes: IntArray, reads: IntArray) -> CacheUse:
    layout: RowLayout = contract.layout(kind)
    rows = np.unique(writes)
    is_live = rows < layout.live_rows
    return CacheUse(
        kind=kind, written=rows[is_live], spare=rows[~is_live], read=np.unique(reads)
    )
