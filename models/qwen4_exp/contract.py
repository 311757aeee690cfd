"""The contract of a Qwen4-Exp graph: cache layouts, planners and every tensor row.

This is the one place that knows the sizes. The builder declares these shapes, the runtime allocates
and fills them. Dimension names (S, P, T, NG ...) are those of models/planner_specs.py.
"""

from __future__ import annotations

from math import ceil

from cachegraph.models.buckets import Bucket, BucketLadder, capped_doubling, doubling
from cachegraph.models.cache_types import CacheTypes, cache_specs
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import (
    EMBEDDINGS,
    LOGITS,
    CacheKind,
    CacheSpec,
    Contract,
    RowLayout,
    RowSharing,
    TensorRow,
    cache_rows,
)
from cachegraph.models.errors import ConfigError
from cachegraph.models.key_rotation import KeyRotation
from cachegraph.models.ngram_spec import ngram_rows
from cachegraph.models.planner_specs import PlannerSpecs, dims
from cachegraph.models.pooled_fields import pooled_rows
from cachegraph.models.pooled_spec import (
    Grouping,
    Liveness,
    PooledSpec,
    Pooling,
    QuerySource,
    cache_pools,
)
from cachegraph.models.qwen4_exp.config import LayerKind, Qwen4ExpConfig
from cachegraph.models.recurrent_spec import MAX_SNAPSHOTS, RecurrentSpec, recurrent_rows
from cachegraph.models.step_rows import batch_rows, results

ATTENTION = (CacheKind.KEYS, CacheKind.VALUES, CacheKind.INDEX, CacheKind.POOLED)
RECURRENT = (CacheKind.CONV_STATE, CacheKind.RECURRENT_STATE)


def layer_caches(config: Qwen4ExpConfig, layer: int) -> tuple[CacheKind, ...]:
    """The caches of one layer, in graph order."""
    if config.layer_kinds[layer] is LayerKind.QSA:
        return ATTENTION
    ngram = (CacheKind.NGRAM_STATE,) if layer in config.ple_layers else ()
    return (*ngram, *RECURRENT)


def planner_specs(config: Qwen4ExpConfig, capacity: Capacity) -> PlannerSpecs:
    """The planners of the model. ConfigError for more rewinding than snapshots are kept."""
    if capacity.rewind > MAX_SNAPSHOTS:
        raise ConfigError(
            f"rewind is {capacity.rewind}; a model with recurrent states keeps up to "
            f"{MAX_SNAPSHOTS} earlier ones of each sequence; choose 0 to {MAX_SNAPSHOTS}"
        )
    pooled = PooledSpec(
        pool=config.index_ratio,
        budget=config.index_budget,
        grouping=Grouping.ORDER,
        pooling=Pooling.MEAN,
        liveness=Liveness.SCORE,
        queries=QuerySource.HIDDEN,
        has_places=True,
        cells=capacity.context,
        sequences=capacity.sequences,
    )
    attends = LayerKind.QSA in config.layer_kinds
    keys = KeyRotation(
        heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim,
        theta=config.rope_theta,
    )
    return PlannerSpecs(
        pooled=pooled if attends else None,
        keys=keys if attends else None,
        recurrent=RecurrentSpec(snapshots=capacity.rewind)
        if LayerKind.GDN in config.layer_kinds
        else None,
        ngrams=tuple(config.ngram(module) for module in range(len(config.ple_layers))),
        context_unit=config.index_ratio,
    )


def ladder(config: Qwen4ExpConfig, capacity: Capacity) -> BucketLadder:
    """The rungs of P, N and S for a capacity; N counts pools.

    The smallest context rung is not below the pools that a query keeps, since ONNX TopK refuses k
    above its columns.
    """
    first = doubling(1, config.top_pools)[-1]
    pools = max(1, ceil(capacity.context / config.index_ratio))
    steps = {p for p in (1, 4, 16, 64) if p < capacity.max_step} | {capacity.max_step}
    return BucketLadder(
        streams=capped_doubling(capacity.sequences),
        steps=tuple(sorted(steps)),
        contexts=doubling(first, pools),
    )


def largest_bucket(config: Qwen4ExpConfig, capacity: Capacity) -> Bucket:
    """The bucket whose every dimension is the ladder's greatest."""
    rungs = ladder(config, capacity)
    return Bucket(
        streams=rungs.streams[-1],
        step=rungs.steps[-1],
        context=rungs.contexts[-1],
        all_rows=True,
    )


def layouts(
    config: Qwen4ExpConfig, capacity: Capacity, sharing: RowSharing
) -> dict[CacheKind, RowLayout]:
    """The row layout of every cache kind that some layer has."""
    specs = planner_specs(config, capacity)
    largest = largest_bucket(config, capacity)
    found: dict[CacheKind, RowLayout] = {}
    if specs.pooled is not None:
        limit = cache_pools(specs.pooled.pool, capacity.context, capacity.sequences)
        sizes = dims(specs, largest)
        # Pools of edits fill more than half of their rung, so that the rest is padding at most.
        pools = sizes["BG"] + limit // 2
        for kind in ATTENTION:
            found[kind] = RowLayout(
                rows_per_stream=capacity.context,
                streams=capacity.sequences,
                spare_rows=pools if kind is CacheKind.POOLED else sizes["T"],
                sharing=sharing,
            )
    if specs.recurrent is not None:
        states = specs.recurrent.layout(capacity.sequences, largest)
        kinds = (*RECURRENT, CacheKind.NGRAM_STATE) if config.ple_layers else RECURRENT
        found |= dict.fromkeys(kinds, states)
    return found


def cache_width(config: Qwen4ExpConfig, kind: CacheKind) -> int:
    """Values per row. A convolution's history holds its oldest token first."""
    attention = config.num_kv_heads * config.head_dim
    return {
        CacheKind.KEYS: attention,
        CacheKind.VALUES: attention,
        CacheKind.INDEX: config.index_head_dim,
        CacheKind.POOLED: config.index_head_dim,
        CacheKind.CONV_STATE: config.conv_history * config.conv_channels,
        CacheKind.RECURRENT_STATE: config.state_width,
        CacheKind.NGRAM_STATE: config.ngram_history * config.stream_width,
    }[kind]


def caches(
    config: Qwen4ExpConfig,
    capacity: Capacity,
    types: CacheTypes,
    sharing: RowSharing = RowSharing.PER_STREAM,
) -> tuple[CacheSpec, ...]:
    """Every cache of the model, layer by layer. ConfigError for a width that a type cannot hold."""
    by_kind = layouts(config, capacity, sharing)
    return tuple(
        spec
        for layer in range(config.num_layers)
        for kind in layer_caches(config, layer)
        for spec in cache_specs(
            layer, kind, types.of(kind), cache_width(config, kind), by_kind[kind]
        )
    )


def contract(
    config: Qwen4ExpConfig,
    capacity: Capacity,
    types: CacheTypes | None = None,
    sharing: RowSharing = RowSharing.PER_STREAM,
    *,
    host_ngrams: bool = False,
) -> Contract:
    """The whole contract of the template graph; caches are f32 unless `types` says otherwise.

    sharing: of attention and indexer rows. host_ngrams: the graph takes rows of the n-gram tables
    that the host has looked up, instead of their numbers.
    """
    specs = caches(config, capacity, types or CacheTypes(), sharing)
    sides = cache_rows(specs)
    half = len(specs)
    rows = (
        *batch_rows(has_places=True),
        *_plan_rows(config, planner_specs(config, capacity), host_ngrams),
        *sides[:half],
        *results(
            config.vocab_size, config.hidden_size, config.stream_width, (LOGITS, EMBEDDINGS)
        ),
        *sides[half:],
    )
    return Contract(rows=rows, caches=specs)


def _plan_rows(
    config: Qwen4ExpConfig, specs: PlannerSpecs, host_ngrams: bool
) -> tuple[TensorRow, ...]:
    rows: tuple[TensorRow, ...] = ()
    if specs.ngrams:
        width = len(specs.ngrams) * config.ple_embed_dim
        rows += ngram_rows(specs.ngrams, width if host_ngrams else None)
    if specs.recurrent is not None:
        rows += recurrent_rows(CacheKind.RECURRENT_STATE)
    if specs.pooled is not None:
        rows += pooled_rows(specs.pooled)
    return rows
