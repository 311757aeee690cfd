"""How `cachegraph inspect` prints a manifest: for people, and as JSON. Opens no graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cachegraph.models.contract import CacheKind, Dim, Padding, RowLayout, TensorRow
from cachegraph.models.manifest import GraphFile, Manifest
from cachegraph.runtime.memory import memory_report
from cachegraph.tools.text_table import byte_words, columns


def manifest_lines(manifest: Manifest) -> Iterator[str]:
    """The whole description as text."""
    yield from _summary(manifest)
    yield from _memory(manifest)
    yield from _ladder(manifest)
    yield ""
    yield "graph inputs and outputs"
    rows = [
        (r.name, _side(r), r.dtype.value, _shape(r.shape), _rule(r), r.meaning)
        for r in _rows(manifest)
    ]
    yield from columns(rows, ("name", "", "dtype", "shape", "padding", "meaning"))
    yield from _files(manifest)


def _summary(manifest: Manifest) -> Iterator[str]:
    capacity, options = manifest.capacity, manifest.exporter.options
    config = manifest.config
    layers = len({cache.layer for cache in manifest.caches})
    yield f"{manifest.family}: {layers} layers, vocabulary {manifest.vocab_size}"
    facts = [
        ("context", f"{capacity.context} tokens in each of {capacity.sequences} sequences"),
        ("rewind", f"{capacity.rewind} tokens of a sequence can be taken back for free"),
        ("longest step", f"{capacity.max_step} tokens of a sequence in one graph call"),
        ("positions", manifest.position_rule),
        ("dialect", f"{options.get('dialect', '?')}, opset {manifest.opset}"),
        (
            "weights",
            f"{options.get('weights', '?')}, accuracy level {manifest.accuracy_level}",
        ),
        ("needs", f"ONNX Runtime {manifest.min_onnxruntime} or newer"),
        ("exported by", f"cachegraph {manifest.exporter.version}"),
        ("planners", _planner_words(manifest)),
        ("draft", _draft_words(manifest)),
        (
            "config",
            ", ".join(f"{k} {v}" for k, v in config.items() if type(v) in (int, float)),
        ),
    ]
    yield from columns(facts)


def _planner_words(manifest: Manifest) -> str:
    specs = manifest.planners
    words = []
    if specs.raw is not None:
        pinned = f", {specs.raw.pinned} pinned" if specs.raw.pinned else ""
        sharing = manifest.layouts[CacheKind.RAW].sharing.value
        words.append(f"raw (window {specs.raw.window}{pinned}, {sharing} rows)")
    for spec in specs.compressors:
        served = " and ".join(kind.value for kind, _ in spec.serves)
        how = "overlapping" if spec.overlap else "not overlapping"
        words.append(f"compressor of {served} (ratio {spec.ratio}, {how})")
    if specs.pooled is not None:
        sharing = manifest.layouts[CacheKind.KEYS].sharing.value
        words.append(
            f"pooled index (pools of {specs.pooled.pool} by {specs.pooled.grouping.value}, a query "
            f"keeps {specs.pooled.top_pools} and its tail, {sharing} rows)"
        )
    if specs.recurrent is not None:
        words.append(f"recurrent states ({specs.recurrent.snapshots} snapshots a sequence)")
    for ngram in specs.ngrams:
        words.append(f"hashed n-grams (up to {len(ngram.multipliers)} tokens)")
    return ", ".join(words)


def _draft_words(manifest: Manifest) -> str:
    draft = manifest.draft
    if draft is None:
        return "none"
    size = memory_report(draft.contract).total + draft.hidden.num_bytes * (
        manifest.capacity.sequences
    )
    return (
        f"MTP block, raw (window {draft.planners.raw_rows.window}), {draft.hidden.rows} carried "
        f"rows of {draft.hidden.width} a sequence; {byte_words(size)} where it is used"
    )


def _memory(manifest: Manifest) -> Iterator[str]:
    yield ""
    report = memory_report(manifest.contract)
    yield f"cache memory: {byte_words(report.total)}, sentinel and spare rows included"
    by_kind = report.by_kind
    rows = []
    for kind, layout in manifest.layouts.items():
        form = manifest.cache_types.of(kind).value
        layers = len({cache.layer for cache in manifest.caches if cache.kind is kind})
        size = byte_words(by_kind[kind])
        rows.append((kind.value, form, layers, *_layout_cells(layout), size))
    yield from columns(rows, _MEMORY_HEADER)
    yield ""
    layer_rows = [
        (
            layer,
            " ".join(dict.fromkeys(c.kind.value for c in manifest.caches if c.layer == layer)),
            byte_words(sum(kinds.values())),
        )
        for layer, kinds in report.by_layer.items()
    ]
    yield from columns(layer_rows, ("layer", "caches", "bytes"))


_MEMORY_HEADER = (
    "kind",
    "type",
    "layers",
    "rows a sequence",
    "sequences",
    "sentinels",
    "spare",
    "bytes",
)


def _layout_cells(layout: RowLayout) -> tuple[object, ...]:
    return layout.rows_per_stream, layout.streams, len(layout.sentinels), layout.spare_rows


def _ladder(manifest: Manifest) -> Iterator[str]:
    rungs = manifest.ladder
    yield ""
    yield "ladder: a call is padded up to the next rung of each size"
    yield from columns(
        [
            ("S", _numbers(rungs.streams), "streams"),
            ("P", _numbers(rungs.steps), "tokens per stream"),
            (
                "N",
                _numbers(rungs.contexts),
                f"rows of {manifest.planners.context_unit} tokens exposed",
            ),
        ]
    )
    yield ""
    yield "dimensions"
    yield from columns(list(manifest.dimensions.items()))


def _numbers(rungs: tuple[int, ...]) -> str:
    return ", ".join(map(str, rungs))


def _rows(manifest: Manifest) -> tuple[TensorRow, ...]:
    return (*manifest.contract.inputs, *manifest.contract.outputs)


def _side(row: TensorRow) -> str:
    return "out" if row.is_output else "in"


def _shape(dims: tuple[Dim, ...]) -> str:
    return "[" + ", ".join(map(str, dims)) + "]"


def _rule(row: TensorRow) -> str:
    if row.padding is Padding.NONE:
        return "-"
    return row.padding.value + (f" of {row.spare_of.value}" if row.spare_of else "")


def _files(manifest: Manifest) -> Iterator[str]:
    yield ""
    yield "files"
    weights = manifest.weights
    rows: list[tuple[str, str]] = [
        (
            stage.template,
            f"template of layers {stage.first} to {stage.end - 1}, {stage.device or 'any device'}",
        )
        for stage in manifest.stages
    ] or [(manifest.template, "template: every size symbolic")]
    if manifest.draft is not None:
        rows.append((manifest.draft.template, "template of the draft graph"))
    rows += [(graph.file, f"static graph: {_sizes(graph)}") for graph in manifest.graphs]
    if weights is not None:
        rows.append(
            (weights.file, f"{byte_words(weights.num_bytes)}, sha256 {weights.sha256}")
        )
    if (tables := manifest.ngram_tables) is not None:
        words = f"n-gram tables of the host, {byte_words(tables.num_bytes)}"
        rows.append((tables.file, f"{words}, sha256 {tables.sha256}"))
    rows += [(name, "tokenizer") for name in manifest.tokenizer]
    yield from columns(rows)
    if weights is None:
        yield "  exported without weights: to inspect, not to run"


def _sizes(graph: GraphFile) -> str:
    bucket = graph.bucket
    return f"S={bucket.streams} P={bucket.step} N={bucket.context}"


def manifest_json(manifest: Manifest) -> Mapping[str, object]:
    """The manifest itself, and the cache bytes that follow from it."""
    report = memory_report(manifest.contract)
    return {
        "manifest": manifest.model_dump(mode="json"),
        "cache_bytes": {
            "total": report.total,
            "by_kind": {kind.value: count for kind, count in report.by_kind.items()},
            "by_layer": {
                str(layer): sum(kinds.values()) for layer, kinds in report.by_layer.items()
            },
        },
    }
