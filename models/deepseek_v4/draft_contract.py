"""The contract of the draft graph: the MTP block as a graph of its own.

Each row of a call is a pair: a token with its own position p + 1, and the residual streams of
position p, which come from the main graph's result or from the draft graph's own. The first token
of a sequence has no pair. The one cache holds the window's raw rows, laid out as the main graph's;
dimension names are those of models/planner_specs.py.
"""

from __future__ import annotations

from dataclasses import replace

from cachegraph.models.buckets import BucketLadder
from cachegraph.models.cache_types import CacheTypes
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import (
    CARRIED,
    LOGITS,
    STREAMS,
    CacheSpec,
    CarriedSpec,
    Contract,
    DType,
    Padding,
    Role,
    TensorRow,
    cache_rows,
)
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.contract import (
    caches,
    ladder,
    planner_specs,
    raw_rows,
    result_rows,
    stream_width,
)
from cachegraph.models.planner_specs import PlannerSpecs
from cachegraph.models.step_rows import batch_rows


def draft_planners(config: DeepseekV4Config, capacity: Capacity) -> PlannerSpecs:
    """The planners of the draft graph: raw rows only, and none of them pinned."""
    return planner_specs(config.draft, _own(capacity))


def draft_ladder(config: DeepseekV4Config, capacity: Capacity) -> BucketLadder:
    """The main graph's rungs of P and S; no compressed rows are exposed."""
    return replace(ladder(config, capacity), contexts=(1,))


def draft_caches(
    config: DeepseekV4Config, capacity: Capacity, types: CacheTypes
) -> tuple[CacheSpec, ...]:
    """The raw cache, numbered as the layer behind the main ones; each stream has its own rows."""
    own = caches(config.draft, _own(capacity), types)
    return tuple(replace(spec, layer=config.num_layers) for spec in own)


def draft_contract(
    config: DeepseekV4Config, capacity: Capacity, types: CacheTypes | None = None
) -> Contract:
    """The whole contract of the draft template; caches are f32 unless `types` says otherwise."""
    specs = draft_caches(config, capacity, types or CacheTypes())
    carried = TensorRow(
        name=CARRIED,
        dtype=DType.FLOAT32,
        shape=("T", stream_width(config)),
        role=Role.CARRIED,
        padding=Padding.ZERO,
        meaning="residual streams of the position before each token",
    )
    sides = cache_rows(specs)
    half = len(specs)
    rows = (
        *batch_rows(),
        carried,
        *raw_rows(),
        *sides[:half],
        *result_rows(config, (LOGITS, STREAMS)),
        *sides[half:],
    )
    return Contract(rows=rows, caches=specs)


def hidden_spec(config: DeepseekV4Config, capacity: Capacity) -> CarriedSpec:
    """The streams kept of each sequence: the last position's, and those a rewind can reach."""
    return CarriedSpec(
        rows=capacity.rewind + 1, width=stream_width(config), dtype=DType.FLOAT32
    )


def _own(capacity: Capacity) -> Capacity:
    """What the draft graph's rows are sized by.

    Drafts may run as far ahead of a sequence as a rewind reaches back, and their rows must not take
    the place of those that its window sees then.
    """
    return replace(capacity, pinned=0, max_step=max(capacity.max_step, capacity.rewind))
