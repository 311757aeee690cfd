"""The contract of a DeepSeek-V4 graph: cache layouts, dimension arithmetic and every tensor row.

This is the one place that knows the sizes. The builder declares these shapes, the runtime allocates
and fills them. Dimension names (S, P, T, NC ...) are those of models/planner_specs.py.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from math import ceil

from cachegraph.models.buckets import Bucket, BucketLadder, capped_doubling, doubling
from cachegraph.models.cache_types import CacheTypes, cache_specs
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import (
    EMBEDDINGS,
    LOGITS,
    STREAMS,
    CacheKind,
    CacheSpec,
    Contract,
    Padding,
    Planner,
    RowLayout,
    RowSharing,
    TensorRow,
    cache_rows,
)
from cachegraph.models.deepseek_v4.config import DeepseekV4Config, LayerKind
from cachegraph.models.plan_fields import (
    NO_PREVIOUS,
    PADDED_BLOCK,
    CompressorFields,
    PlanInput,
    RawFields,
    plan_name,
    plan_rows,
)
from cachegraph.models.planner_specs import CompressorSpec, PlannerSpecs, RawSpec, dims
from cachegraph.models.step_rows import batch_rows, results

_STATE_OF = {
    CacheKind.CSA: CacheKind.CSA_STATE,
    CacheKind.LID: CacheKind.LID_STATE,
    CacheKind.HCA: CacheKind.HCA_STATE,
}
_SUFFIX = {CacheKind.CSA: "C", CacheKind.HCA: "H"}  # of the dims B, A, K
_LAYER_CACHES = {
    LayerKind.WINDOW: (CacheKind.RAW,),
    LayerKind.CSA: (
        CacheKind.RAW,
        CacheKind.CSA,
        CacheKind.LID,
        CacheKind.CSA_STATE,
        CacheKind.LID_STATE,
    ),
    LayerKind.HCA: (CacheKind.RAW, CacheKind.HCA, CacheKind.HCA_STATE),
}


def state_kind(kind: CacheKind) -> CacheKind:
    """The state ring that belongs to a compressed cache kind."""
    return _STATE_OF[kind]


def is_overlapping(kind: CacheKind) -> bool:
    """Whether a compressor's windows reach back into the previous block (CSA and indexer)."""
    return kind in (CacheKind.CSA, CacheKind.LID)


def compressor_kinds(config: DeepseekV4Config) -> tuple[CacheKind, ...]:
    """The kinds that have a plan of their own. The CSA plan serves the indexer's rows too."""
    pairs = ((LayerKind.CSA, CacheKind.CSA), (LayerKind.HCA, CacheKind.HCA))
    return tuple(kind for layer, kind in pairs if layer in config.layer_kinds)


def ratio_of(config: DeepseekV4Config, kind: CacheKind) -> int:
    """Tokens per compressed row of a cache kind."""
    return config.hca_ratio if kind is CacheKind.HCA else config.csa_ratio


def window_rows(config: DeepseekV4Config, kind: CacheKind) -> int:
    """State rows of a closing window: 2R with overlap, else R."""
    return ratio_of(config, kind) * (2 if is_overlapping(kind) else 1)


def rows_per_stream(config: DeepseekV4Config, capacity: Capacity, kind: CacheKind) -> int:
    """Live rows of one stream in a cache kind."""
    if kind is CacheKind.RAW:
        window = capacity.pinned + config.sliding_window
        return window + capacity.max_step + capacity.rewind
    if kind in _STATE_OF:
        return max(1, ceil(capacity.context / ratio_of(config, kind)))
    compressed = next(k for k, state in _STATE_OF.items() if state is kind)
    return window_rows(config, compressed) + capacity.rewind


def planner_specs(config: DeepseekV4Config, capacity: Capacity) -> PlannerSpecs:
    """The planners of the model. The CSA plan serves the indexer's rows too."""
    serves = {
        CacheKind.CSA: (CacheKind.CSA, CacheKind.LID),
        CacheKind.HCA: (CacheKind.HCA,),
    }
    return PlannerSpecs(
        raw=RawSpec(window=config.sliding_window, pinned=capacity.pinned),
        compressors=tuple(
            CompressorSpec(
                kind=kind,
                serves=tuple((served, _STATE_OF[served]) for served in serves[kind]),
                ratio=ratio_of(config, kind),
                overlap=is_overlapping(kind),
                rewind=capacity.rewind,
            )
            for kind in compressor_kinds(config)
        ),
        context_unit=config.csa_ratio,
    )


def ladder(config: DeepseekV4Config, capacity: Capacity) -> BucketLadder:
    """The rungs of P, N and S for a capacity.

    The smallest context rung is not below top-k, since ONNX TopK refuses k above its columns.
    """
    first = doubling(1, config.index_topk)[-1]
    rows = max(1, ceil(capacity.context / config.csa_ratio))
    steps = {p for p in (1, 4, 16, 64) if p < capacity.max_step} | {capacity.max_step}
    return BucketLadder(
        streams=capped_doubling(capacity.sequences),
        steps=tuple(sorted(steps)),
        contexts=doubling(first, rows),
    )


def largest_bucket(config: DeepseekV4Config, capacity: Capacity) -> Bucket:
    """The bucket whose every dimension is the ladder's greatest."""
    rungs = ladder(config, capacity)
    return Bucket(
        streams=rungs.streams[-1],
        step=rungs.steps[-1],
        context=rungs.contexts[-1],
        closes=compressor_kinds(config),
        all_rows=True,
    )


def layouts(
    config: DeepseekV4Config, capacity: Capacity, raw: RowSharing = RowSharing.PER_STREAM
) -> dict[CacheKind, RowLayout]:
    """The row layout of every cache kind that some layer has.

    Spare rows are as many as the largest bucket can pad: each padded write has its own.
    """
    largest = dims(planner_specs(config, capacity), largest_bucket(config, capacity))
    spare = {CacheKind.RAW: largest["T"]}
    for kind in (CacheKind.CSA, CacheKind.LID, CacheKind.HCA):
        suffix = _SUFFIX.get(kind, "C")
        spare[kind] = largest.get("B" + suffix, 0)
        spare[_STATE_OF[kind]] = largest.get("K" + suffix, 0)
    present = {kind for layer in config.layer_kinds for kind in _LAYER_CACHES[layer]}
    return {
        kind: RowLayout(
            rows_per_stream=rows_per_stream(config, capacity, kind),
            streams=capacity.sequences,
            sentinels=_sentinels(kind),
            spare_rows=spare[kind],
            sharing=raw if kind is CacheKind.RAW else RowSharing.PER_STREAM,
        )
        for kind in CacheKind
        if kind in present
    }


def _sentinels(kind: CacheKind) -> tuple[str, ...]:
    if kind in (CacheKind.CSA_STATE, CacheKind.LID_STATE):
        return (NO_PREVIOUS, PADDED_BLOCK)
    return (PADDED_BLOCK,) if kind is CacheKind.HCA_STATE else ()


def cache_width(config: DeepseekV4Config, kind: CacheKind) -> int:
    """Values per row. State rows hold `kv` then `score`, each twice as wide with overlap."""
    head = {CacheKind.LID: config.index_head_dim, CacheKind.LID_STATE: config.index_head_dim}
    width = head.get(kind, config.head_dim)
    if kind is CacheKind.HCA_STATE:
        return 2 * width
    return 4 * width if kind in (CacheKind.CSA_STATE, CacheKind.LID_STATE) else width


def caches(
    config: DeepseekV4Config,
    capacity: Capacity,
    types: CacheTypes,
    raw: RowSharing = RowSharing.PER_STREAM,
) -> tuple[CacheSpec, ...]:
    """Every cache of the model, layer by layer. ConfigError for a width that a type cannot hold."""
    by_kind = layouts(config, capacity, raw)
    return tuple(
        spec
        for layer, layer_kind in enumerate(config.layer_kinds)
        for kind in _LAYER_CACHES[layer_kind]
        for spec in cache_specs(
            layer, kind, types.of(kind), cache_width(config, kind), by_kind[kind]
        )
    )


def contract(
    config: DeepseekV4Config,
    capacity: Capacity,
    types: CacheTypes | None = None,
    raw: RowSharing = RowSharing.PER_STREAM,
    *,
    with_streams: bool = False,
) -> Contract:
    """The whole contract of the template graph; caches are f32 unless `types` says otherwise.

    with_streams: the graph also gives the residual streams, which a draft graph starts from.
    """
    specs = caches(config, capacity, types or CacheTypes(), raw)
    plans = raw_rows()
    for kind in compressor_kinds(config):
        plans += _compressor_rows(config, kind)
    names = (LOGITS, EMBEDDINGS, STREAMS) if with_streams else (LOGITS, EMBEDDINGS)
    sides = cache_rows(specs)
    half = len(specs)
    rows = (*batch_rows(), *plans, *sides[:half], *result_rows(config, names), *sides[half:])
    return Contract(rows=rows, caches=specs)


def result_rows(config: DeepseekV4Config, names: Collection[str]) -> tuple[TensorRow, ...]:
    """The results of these names, which the host reads."""
    return results(config.vocab_size, config.hidden_size, stream_width(config), names)


def stream_width(config: DeepseekV4Config) -> int:
    """M*D: values of all residual streams of a token."""
    return config.hc_mult * config.hidden_size


def raw_rows() -> tuple[TensorRow, ...]:
    """Plan inputs of the raw caches."""
    rows = RawFields[PlanInput](
        write_idxs=PlanInput(
            ("T",), Padding.SPARE, "raw row that takes each token", CacheKind.RAW
        ),
        read_idxs=PlanInput(
            ("S", "W"), Padding.LAST, "raw rows each stream reads, own ones too"
        ),
        read_pos=PlanInput(("S", "W"), Padding.ZERO, "position held by each row read"),
        read_counts=PlanInput(
            ("S",), Padding.ZERO, "rows read per stream; later ones are masked"
        ),
    )
    return _named(Planner.RAW, CacheKind.RAW, rows)


def _compressor_rows(config: DeepseekV4Config, kind: CacheKind) -> tuple[TensorRow, ...]:
    """Plan rows of one compressor.

    A **source table** is [A carried state rows | T rows of this call]; the closing windows and the
    rows to persist are both taken from it, which orders every read of old state before the write.
    """
    suffix, state = _SUFFIX[kind], _STATE_OF[kind]
    window = window_rows(config, kind)
    rows = CompressorFields[PlanInput](
        state_pos=PlanInput(
            ("T",), Padding.ZERO, "position modulo ratio: row of the position bias"
        ),
        state_old_idxs=PlanInput(
            ("A" + suffix,),
            Padding.SENTINEL,
            "state rows carried into the source table",
            state,
        ),
        state_read_idxs=PlanInput(
            ("B" + suffix, window),
            Padding.SENTINEL,
            "source-table rows of each closing window, the previous block's first",
            state,
        ),
        state_persist_src_idxs=PlanInput(
            ("K" + suffix,), Padding.LAST, "source-table rows to keep in the state ring"
        ),
        state_persist_dst_idxs=PlanInput(
            ("K" + suffix,), Padding.SPARE, "state rows that take them", state
        ),
        state_write_idxs=PlanInput(
            ("B" + suffix,),
            Padding.SPARE,
            "compressed row that takes each closing block",
            kind,
        ),
        state_write_pos=PlanInput(
            ("B" + suffix,),
            Padding.ZERO,
            "RoPE position of each closing block: its first token",
        ),
        n_visible=PlanInput(("T",), Padding.ZERO, "compressed rows each token may see"),
        rows=PlanInput(
            ("S", "N" + suffix), Padding.LAST, "compressed rows exposed to each stream"
        ),
    )
    return _named(Planner.COMPRESSOR, kind, rows)


def _named(
    planner: Planner,
    kind: CacheKind,
    fields: RawFields[PlanInput] | CompressorFields[PlanInput],
) -> tuple[TensorRow, ...]:
    return plan_rows(planner, partial(plan_name, kind), fields._fields, fields)
