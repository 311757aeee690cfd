"""`cachegraph export`: a checkpoint becomes a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cachegraph.models.cache_types import CacheType
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import RowSharing
from cachegraph.models.errors import ConfigError
from cachegraph.models.export_options import (
    Dialect,
    Experts,
    ExportOptions,
    NgramPlace,
    RowRead,
    RowWrite,
    Select,
    WeightType,
)
from cachegraph.tools.output import JsonFlag, note, print_json
from cachegraph.tools.progress import staged_progress
from cachegraph.tools.static_sizes import parse_size

PlacesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="[CHECKPOINT] OUT",
        help="Checkpoint folder or a shipped model (tiny:deepseek_v4), then the folder to "
        "write. With --preset only the folder to write.",
    ),
]
DialectOption = Annotated[
    Dialect,
    typer.Option(
        help="portable: only ai.onnx operators. ort: com.microsoft operators too, which "
        "ONNX Runtime runs faster."
    ),
]
WeightsOption = Annotated[
    WeightType,
    typer.Option(
        help="Form of the big matrices. f16 and bf16 halve the file, but on CPU they run as "
        "f32; int8 and int4 are blockwise and faster, and round activations too. Norms, "
        "router, compressor and indexer projections and DeepSeek-V4's hyper-connections stay "
        "in float."
    ),
]
ContextOption = Annotated[
    int, typer.Option(min=1, help="Tokens each sequence can hold; sets the cache sizes.")
]
SequencesOption = Annotated[
    int, typer.Option(min=1, help="Sequences the caches hold side by side.")
]
MaxStepOption = Annotated[
    int, typer.Option(min=1, help="Most tokens of one sequence in one graph call.")
]
RewindOption = Annotated[
    int,
    typer.Option(min=0, help="Tokens that can be taken back from a sequence for free."),
]
PinnedOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="First tokens of each sequence whose raw rows stay and are seen by every later "
        "token. Not the published model: only 0 gives its answers.",
    ),
]
SplitOption = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Layers of each stage: writes one graph a stage, which run one after another.",
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE,...",
        help="Where each stage of --split runs and keeps its caches: cpu, cuda:0, cuda:1 and so "
        "on. Written to the manifest; an engine opened with device cpu runs all of them there.",
    ),
]
SelectOption = Annotated[
    Select,
    typer.Option(help="How attention reads the indexer's rows: gathered, or all masked."),
]
ExpertsOption = Annotated[
    Experts, typer.Option(help="Compute the chosen experts, or all of them.")
]
GatherOption = Annotated[
    RowRead,
    typer.Option(
        help="Operator that reads whole cache rows: Gather, GatherElements, GatherND."
    ),
]
ScatterOption = Annotated[
    RowWrite,
    typer.Option(help="Operator that writes whole cache rows: ScatterND, ScatterElements."),
]
CacheOption = Annotated[
    CacheType,
    typer.Option(
        help="Form of raw, CSA and HCA rows. f16 and bf16 halve them; q8_0 is int8 with one "
        "f16 scale for 32 values. State rings stay f32."
    ),
]
IndexCacheOption = Annotated[
    CacheType, typer.Option(help="Form of the indexer's keys, as --cache has them.")
]
RawOption = Annotated[
    RowSharing,
    typer.Option(
        help="Raw rows: a block for each sequence, or one pool that copies of a sequence share."
    ),
]
NgramOption = Annotated[
    NgramPlace,
    typer.Option(
        help="Where Qwen4-Exp's n-gram tables live: in the graph, or in a file of their own of "
        "which the host reads each token's rows; auto means the host above a gigabyte."
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        help="Build a published model's graphs instead of a checkpoint's: deepseek-v4-flash, "
        "deepseek-v4-pro or qwen3.8-flash-next. Needs --no-weights."
    ),
]
NoWeightsOption = Annotated[
    bool,
    typer.Option("--no-weights", help="Write no weights file: to inspect, not to run."),
]
StaticOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SxPxN",
        help="Static graph to write, as STREAMSxSTEPxCONTEXT (compressed rows); may be "
        "given several times. Default: decode and the longest prefill at full context.",
    ),
]
DraftOption = Annotated[
    bool,
    typer.Option(
        help="Write the draft graph of the MTP block too, where the checkpoint has one. Without "
        "it the main graph gives no residual streams, and nothing can draft."
    ),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace a bundle that is already there.")
]


def command(
    places: PlacesArgument,
    dialect: DialectOption = Dialect.PORTABLE,
    weights: WeightsOption = WeightType.F32,
    context: ContextOption = 4096,
    sequences: SequencesOption = 1,
    max_step: MaxStepOption = 128,
    rewind: RewindOption = 8,
    pinned: PinnedOption = 0,
    select: SelectOption = Select.GATHER,
    experts: ExpertsOption = Experts.CHOSEN,
    gather: GatherOption = RowRead.ROWS,
    scatter: ScatterOption = RowWrite.ND,
    cache: CacheOption = CacheType.F32,
    index_cache: IndexCacheOption = CacheType.F32,
    raw: RawOption = RowSharing.PER_STREAM,
    ngram: NgramOption = NgramPlace.AUTO,
    draft: DraftOption = True,
    split: SplitOption = None,
    devices: DevicesOption = None,
    preset: PresetOption = None,
    no_weights: NoWeightsOption = False,
    static: StaticOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Export a checkpoint to a bundle: graphs, weights, tokenizer and manifest.json.

    Example: cachegraph export tiny:deepseek_v4 out/tiny --dialect ort
    """
    _check_places(places, preset, no_weights)
    options = ExportOptions(
        dialect=dialect,
        weights=weights,
        select=select,
        experts=experts,
        gather=gather,
        scatter=scatter,
        cache=cache,
        index_cache=index_cache,
        raw=raw,
        ngram=ngram,
        draft=draft,
        split=_counts(split),
        devices=tuple(devices.split(",")) if devices else (),
        capacity=Capacity(
            context=context,
            sequences=sequences,
            max_step=max_step,
            rewind=rewind,
            pinned=pinned,
        ),
    )
    written = _write(preset or places[0], places[-1], options, static, overwrite, bool(preset))
    if as_json:
        print_json({"bundle": str(written)})
    else:
        note(f"wrote {written}")


def _write(
    model: str,
    out: str,
    options: ExportOptions,
    static: Sequence[str] | None,
    overwrite: bool,
    is_preset: bool,
) -> Path:
    """Export a checkpoint or a preset and show how far it is."""
    sizes = None if static is None else [parse_size(text) for text in static]
    from cachegraph.graphgen import StaticSize, export, export_preset

    with staged_progress() as progress:
        run = export_preset if is_preset else export
        return run(
            model,
            out,
            options,
            static=None if sizes is None else [StaticSize(*size) for size in sizes],
            overwrite=overwrite,
            progress=progress,
        )


def _counts(split: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(count) for count in split.split(",")) if split else ()
    except ValueError:
        raise ConfigError(
            f"--split {split!r}: wanted layers of each stage, such as 22,21"
        ) from None


def _check_places(places: list[str], preset: str | None, no_weights: bool) -> None:
    if bool(preset) != no_weights:
        raise ConfigError("--preset and --no-weights go together: a preset has no weights")
    if len(places) != (1 if preset else 2):
        wanted = "OUT" if preset else "CHECKPOINT OUT"
        raise ConfigError(f"got {len(places)} places, wanted {wanted}; see --help")
