"""Static graphs of a bundle: chosen sizes checked against its ladder, frozen, listed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import onnx

from cachegraph.graphgen.freeze import freeze
from cachegraph.models.buckets import Bucket, BucketLadder
from cachegraph.models.errors import ConfigError, ContractError
from cachegraph.models.manifest import GraphFile, read_manifest, write_manifest
from cachegraph.models.planner_specs import PlannerSpecs, dims


class StaticSize(NamedTuple):
    """Sizes of a static graph: streams, tokens per stream, compressed rows exposed."""

    streams: int
    step: int
    context: int


def static_bucket(size: StaticSize, ladder: BucketLadder, planners: PlannerSpecs) -> Bucket:
    """The bucket of a static graph, in which blocks of every kind may close.

    Sizes need not be rungs, but must not pass the ladder's ends (the caches have no more rows, and
    TopK no fewer columns); ConfigError where one does.
    """
    bounds = {
        "streams": (1, ladder.streams[-1]),
        "step": (1, ladder.steps[-1]),
        "context": (ladder.contexts[0], ladder.contexts[-1]),
    }
    for name, (low, high) in bounds.items():
        value = getattr(size, name)
        if not low <= value <= high:
            raise ConfigError(
                f"static graph {'x'.join(map(str, size))}: {name} is {value}; this bundle "
                f"allows {low} to {high}"
            )
    closes = tuple(spec.kind for spec in planners.compressors)
    return Bucket(streams=size.streams, step=size.step, context=size.context, closes=closes)


def write_static(
    proto: onnx.ModelProto, planners: PlannerSpecs, bucket: Bucket, folder: Path
) -> GraphFile:
    """Freeze a template for one bucket into `folder`."""
    sizes = dims(planners, bucket)
    name = f"{bucket.name}.onnx"
    onnx.save(freeze(proto, sizes), folder / name)
    return GraphFile(file=name, bucket=bucket, dims=sizes)


def _load_template(path: Path) -> onnx.ModelProto:
    """The template without its weights; ContractError where the file is damaged."""
    try:
        proto = onnx.load(path, load_external_data=False)
    except OSError:
        raise
    except Exception as error:  # protobuf's own classes, which differ by its version
        raise ContractError(f"{path} is damaged ({error}); export the bundle again") from error
    if not proto.graph.node:
        raise ContractError(f"{path} holds no graph; export the bundle again")
    return proto


def freeze_bundle(folder: str | Path, sizes: Sequence[StaticSize]) -> list[GraphFile]:
    """Add static graphs to a bundle, on the same weights file; a graph already there is kept."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest.stages:
        raise ConfigError(
            f"{folder} is split into stages, of which static graphs are not made; export it "
            "without --split"
        )
    buckets = [static_bucket(size, manifest.ladder, manifest.planners) for size in sizes]
    proto = _load_template(folder / manifest.template)
    known = {graph.bucket: graph for graph in manifest.graphs}
    for bucket in buckets:
        if bucket not in known:
            known[bucket] = write_static(proto, manifest.planners, bucket, folder)
    write_manifest(folder, manifest.model_copy(update={"graphs": tuple(known.values())}))
    return [known[bucket] for bucket in buckets]
