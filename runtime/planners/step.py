"""The plan of one step: a ubatch and the plans that its family needs, all validated.

Here the raw plan and those of compressors are made; those of hybrid memory in `hybrid.py`. Sizes
come from the planner specs and layouts that a manifest carries. Pure: the cell table is only read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from cachegraph.models.buckets import Bucket, BucketLadder
from cachegraph.models.contract import CacheKind, Contract
from cachegraph.models.planner_specs import PlannerSpecs, RawSpec
from cachegraph.models.pooled_spec import pooled_dims
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.cells import CellTable, Reservation
from cachegraph.runtime.planners.compressor import (
    CompressorPlan,
    CompressorSizes,
    PlanTokens,
    plan_compressor,
)
from cachegraph.runtime.planners.pooled import PooledPlan
from cachegraph.runtime.planners.raw import RawPlan, plan_raw
from cachegraph.runtime.planners.recurrent import RecurrentPlan
from cachegraph.runtime.planners.validate import validate_compressor, validate_raw
from cachegraph.runtime.split import UBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """What planning needs to know of a bundle: the raw rows, and each compressor with a plan."""

    raw_rows: int
    raw: RawSpec
    compressors: Mapping[CacheKind, CompressorSizes]

    @classmethod
    def of(cls, specs: PlannerSpecs, contract: Contract) -> StepSizes:
        """Sizes from planner specs and layouts; ContractError where these do not fit."""
        return cls(
            raw_rows=contract.layout(CacheKind.RAW).live_rows,
            raw=specs.raw_rows,
            compressors={c.kind: CompressorSizes.of(c, contract) for c in specs.compressors},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """All logical plans of one graph call, validated. `reservation` is what success commits.

    A plan that the family has no planner for is None. ngram_ids: [T, heads of all modules].
    """

    ubatch: UBatch
    reservation: Reservation
    raw: RawPlan | None = None
    compressors: Mapping[CacheKind, CompressorPlan] = field(default_factory=dict)
    pooled: PooledPlan | None = None
    recurrent: RecurrentPlan | None = None
    ngram_ids: IntArray | None = None

    @property
    def closes(self) -> tuple[CacheKind, ...]:
        """Kinds of which a block closes in this step."""
        return tuple(kind for kind, plan in self.compressors.items() if plan.num_blocks)

    @property
    def exposed(self) -> dict[CacheKind, int]:
        """Compressed rows that the bucket must expose, for each kind."""
        return {kind: plan.num_exposed for kind, plan in self.compressors.items()}

    @property
    def num_pools(self) -> int:
        """Most pools of one stream of the step."""
        if self.pooled is None:
            return 0
        return max(self.pooled.layouts[seq].num_pools for seq in self.ubatch.streams)

    @property
    def wanted_rows(self) -> IntArray:
        """Ubatch entries whose logits are wanted, ascending."""
        return self.ubatch.wants_logits.nonzero()[0]

    @property
    def all_rows(self) -> bool:
        """Whether more rows want logits than the call has streams."""
        return self.wanted_rows.size > len(self.ubatch.streams)


def pick_bucket(specs: PlannerSpecs, ladder: BucketLadder, step: StepPlan) -> Bucket:
    """The smallest bucket that holds a step; CapacityError where none does."""
    exposed = [
        specs.context_rows(c, step.compressors[c.kind].num_exposed) for c in specs.compressors
    ]
    pick = partial(
        ladder.pick,
        streams=len(step.ubatch.streams),
        step=step.ubatch.step,
        context=max((*exposed, step.num_pools, 1)),
        closes=step.closes,
        all_rows=step.all_rows,
    )
    bucket = pick()
    if specs.pooled is None or step.pooled is None:
        return bucket
    made = pooled_dims(specs.pooled, bucket)["BG"]
    edited = step.pooled.new_pools.size - made
    return pick(repooled=edited) if edited > 0 else bucket


def plan_step(sizes: StepSizes, cells: CellTable, ubatch: UBatch) -> StepPlan:
    """Plan one call; changes nothing.

    CapacityError where the raw rows have no room, PlanError where a plan is not valid.
    """
    reservation = cells.reserve(ubatch)
    view = cells.after(reservation)
    first = ubatch.positions.reshape(len(ubatch.streams), ubatch.step).min(axis=1)
    raw = plan_raw(
        view,
        write_idxs=reservation.rows,
        streams=ubatch.streams,
        oldest=first - (sizes.raw.window - 1),
        pinned=sizes.raw.pinned,
    )
    validate_raw(raw, view, ubatch.positions, num_rows=sizes.raw_rows)
    tokens = PlanTokens.of_ubatch(ubatch)
    compressors = {}
    for kind, compressor in sizes.compressors.items():
        compressors[kind] = plan_compressor(compressor, tokens)
        validate_compressor(kind.value, compressor, compressors[kind], ubatch.positions.size)
    return StepPlan(ubatch=ubatch, reservation=reservation, raw=raw, compressors=compressors)
