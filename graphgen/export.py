"""Checkpoint in, bundle out: graphs, one weights file, tokenizer, manifest.

The bundle is written beside its final place and renamed when it is complete, so that an export that
fails or is interrupted leaves nothing behind that looks like a bundle.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import onnx
import onnx_ir as ir

from cachegraph.graphgen.families import checkpoint_source, preset_source
from cachegraph.graphgen.layers.linear import ACCURACY_LEVEL
from cachegraph.graphgen.source import DraftSource, ModelSource, StageSource
from cachegraph.graphgen.static import StaticSize, static_bucket, write_static
from cachegraph.graphgen.template import OPSET, Template, build_template
from cachegraph.graphgen.weights.parameter import Read, Weight
from cachegraph.graphgen.weights.writer import (
    WeightsLayout,
    attach,
    plan_layout,
    write_weights,
)
from cachegraph.models.buckets import Bucket
from cachegraph.models.contract import DType
from cachegraph.models.errors import ConfigError
from cachegraph.models.export_options import ExportOptions
from cachegraph.models.manifest import (
    MANIFEST_NAME,
    DraftEntry,
    Exporter,
    GraphFile,
    Manifest,
    NgramFile,
    StageEntry,
    WeightsFile,
    cache_entries,
    cache_layouts,
    write_manifest,
)
from cachegraph.models.planner_specs import formulas
from cachegraph.models.shipped import resolve
from cachegraph.models.version import VERSION

TEMPLATE_NAME = "template.onnx"
DRAFT_NAME = "draft.onnx"
WEIGHTS_NAME = "weights.safetensors"
TABLES_NAME = "ngram.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MIN_ONNXRUNTIME = "1.31.0"  # the oldest version the kernels and tie rules were measured on

Progress = Callable[[str, int, int], None]  # stage, done, total


def export(
    checkpoint: str | Path,
    out: str | Path,
    options: ExportOptions | None = None,
    *,
    static: Sequence[StaticSize] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Export a checkpoint folder, or a shipped model by name (tiny:deepseek_v4), to a bundle.

    Args:
        static: sizes of the static graphs written; by default decode and the longest prefill.
        overwrite: replace a bundle that is already at `out`.
        progress: called with stage, done and total; bytes in the stage "weights".

    Raises ConfigError, CheckpointError or GraphBuildError; then `out` is as it was.
    """
    options = options or ExportOptions()
    folder = resolve(str(checkpoint))
    source = checkpoint_source(folder, options)
    tokenizer = [folder / n for n in TOKENIZER_FILES if (folder / n).is_file()]
    return _export(source, Path(out), options, static, overwrite, progress, tokenizer, True)


def export_preset(
    preset: str,
    out: str | Path,
    options: ExportOptions | None = None,
    *,
    static: Sequence[StaticSize] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Export the graphs of a published model without its weights, to be inspected."""
    options = options or ExportOptions()
    source = preset_source(preset, options)
    return _export(source, Path(out), options, static, overwrite, progress, [], False)


def _export(
    source: ModelSource,
    out: Path,
    options: ExportOptions,
    static: Sequence[StaticSize] | None,
    overwrite: bool,
    progress: Progress | None,
    tokenizer: Sequence[Path],
    with_weights: bool,
) -> Path:
    report = progress or (lambda stage, done, total: None)
    if out.is_symlink():
        raise ConfigError(f"{out} is a link; name the folder it points to")
    out = out.resolve()
    _check_target(out, overwrite)
    if source.stages and static:
        raise ConfigError(
            "static graphs of stages are not made; leave out --static or --split"
        )
    buckets = () if source.stages else _static_buckets(source, static)
    read = source.open_read() if with_weights else None
    with _staging(out, overwrite) as folder:
        report("graph", 0, 1)
        templates = _build_templates(source)
        weights = [weight for built in templates.values() for weight in built.weights]
        layout = plan_layout(weights)
        attach(weights, layout, WEIGHTS_NAME)
        protos = {name: ir.to_proto(built.model) for name, built in templates.items()}
        for name, proto in protos.items():
            onnx.save(proto, folder / name)
        report("graph", 1, 1)
        first = next(iter(protos))
        graphs = _write_static(protos[first], source, buckets, folder, report)
        file = tables = None
        if read:
            sink = _Sink(folder, read, report)
            file = sink.write(WEIGHTS_NAME, "weights", weights, layout)
            tables = _write_tables(sink, source.tables)
        for path in tokenizer:
            shutil.copyfile(path, folder / path.name)
        names = [path.name for path in tokenizer]
        write_manifest(folder, _manifest(source, options, graphs, file, tables, names))
    return out


def _build_templates(source: ModelSource) -> dict[str, Template]:
    """The templates by file name, the draft's last: it may use bytes of the others' weights."""
    name, draft = source.family, source.draft
    contracts = dict(enumerate(stage.contract for stage in source.stages))
    built = {
        stage_name(number): build_template(source.emit, contract, name=f"{name}_{number}")
        for number, contract in contracts.items()
    } or {TEMPLATE_NAME: build_template(source.emit, source.contract, name=name)}
    if draft is not None:
        built[DRAFT_NAME] = build_template(draft.emit, draft.contract, name=f"{name}_draft")
    return built


def stage_name(number: int) -> str:
    """The file of a stage's template."""
    return f"stage{number}.onnx"


def _check_target(out: Path, overwrite: bool) -> None:
    """ConfigError unless `out` is free, an empty folder, or a bundle that may be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST_NAME).is_file():
        raise ConfigError(f"{out} exists and is no bundle; choose another place")
    if not overwrite:
        raise ConfigError(f"{out} holds a bundle already; choose another place or --overwrite")


@contextmanager
def _staging(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `out` that takes its place when the block succeeds.

    What stood there is moved aside first and removed last, so that no moment has neither.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=f".{out.name}.partial.", dir=out.parent))
    folder.chmod(0o755)  # mkdtemp makes it private
    try:
        yield folder
        _check_target(out, overwrite)  # it may have been filled meanwhile
        aside = folder.with_name(f"{folder.name}.old")
        if out.exists():
            out.rename(aside)
        try:
            folder.rename(out)
        except BaseException:
            if aside.exists():
                aside.rename(out)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _static_buckets(
    source: ModelSource, static: Sequence[StaticSize] | None
) -> tuple[Bucket, ...]:
    rungs = source.ladder
    if static is None:
        full = rungs.contexts[-1]
        static = [StaticSize(1, rungs.steps[0], full), StaticSize(1, rungs.steps[-1], full)]
    buckets = (static_bucket(size, rungs, source.planners) for size in static)
    return tuple(dict.fromkeys(buckets))


def _write_static(
    proto: onnx.ModelProto,
    source: ModelSource,
    buckets: Sequence[Bucket],
    folder: Path,
    report: Progress,
) -> list[GraphFile]:
    files = []
    for done, bucket in enumerate(buckets):
        report("static graphs", done, len(buckets))
        files.append(write_static(proto, source.planners, bucket, folder))
    report("static graphs", len(buckets), len(buckets))
    return files


@dataclass(frozen=True, slots=True)
class _Sink:
    """Writes weights files into a folder from what `read` gives."""

    folder: Path
    read: Read
    report: Progress

    def write(
        self, name: str, stage: str, weights: Sequence[Weight], layout: WeightsLayout
    ) -> WeightsFile:
        """Write one file and report its bytes in a stage."""
        total, done = layout.num_bytes - len(layout.header), 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            self.report(stage, done, total)

        self.report(stage, 0, total)
        recipes = dict.fromkeys(weight.recipe for weight in weights)
        digest = write_weights(self.folder / name, layout, recipes, self.read, count)
        return WeightsFile(
            file=name,
            num_bytes=layout.num_bytes,
            header_sha256=layout.header_sha256,
            sha256=digest,
        )


def _write_tables(sink: _Sink, tables: Sequence[Weight]) -> NgramFile | None:
    """Write the n-gram tables of the host, if there are any."""
    if not tables:
        return None
    file = sink.write(TABLES_NAME, "n-gram tables", tables, plan_layout(tables))
    first = tables[0]
    assert first.dtype is not None
    return NgramFile(
        **file.model_dump(),
        tensors=tuple(str(table.name) for table in tables),
        dtype=DType(first.dtype.numpy().name),
        rows=tuple(table.sizes[0] for table in tables),
        width=first.sizes[1],
    )


def _manifest(
    source: ModelSource,
    options: ExportOptions,
    graphs: Sequence[GraphFile],
    weights: WeightsFile | None,
    tables: NgramFile | None,
    tokenizer: Sequence[str],
) -> Manifest:
    return Manifest(
        exporter=Exporter(version=VERSION, options=options.to_json()),
        family=source.family,
        config=dict(source.config),
        capacity=options.capacity,
        opset=OPSET,
        min_onnxruntime=MIN_ONNXRUNTIME,
        accuracy_level=ACCURACY_LEVEL,
        position_rule=source.position_rule,
        planners=source.planners,
        dimensions=formulas(source.planners),
        ladder=source.ladder,
        layouts=cache_layouts(source.contract),
        sentinels=dict(source.sentinels),
        cache_types=options.cache_types,
        caches=cache_entries(source.contract),
        tensors=source.contract.rows,
        template=stage_name(0) if source.stages else TEMPLATE_NAME,
        graphs=tuple(graphs),
        weights=weights,
        tokenizer=tuple(tokenizer),
        bos_token_id=source.bos_token_id,
        eos_token_ids=source.eos_token_ids,
        vocab_size=source.vocab_size,
        draft=_draft_entry(source.draft) if source.draft else None,
        stages=tuple(_stage_entry(*numbered) for numbered in enumerate(source.stages)),
        ngram_tables=tables,
    )


def _stage_entry(number: int, stage: StageSource) -> StageEntry:
    return StageEntry(
        template=stage_name(number),
        first=stage.layers.start,
        end=stage.layers.stop,
        device=stage.device,
        tensors=stage.contract.rows,
    )


def _draft_entry(draft: DraftSource) -> DraftEntry:
    return DraftEntry(
        template=DRAFT_NAME,
        planners=draft.planners,
        dimensions=formulas(draft.planners),
        ladder=draft.ladder,
        layouts=cache_layouts(draft.contract),
        caches=cache_entries(draft.contract),
        tensors=draft.contract.rows,
        hidden=draft.hidden,
    )
