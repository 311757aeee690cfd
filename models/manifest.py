"""manifest.json: everything a host must know to run a bundle, as a typed, versioned schema.

A host in another language can be written from this file and the row rules it names. Reading checks
every field; an unknown version or a missing field is one clear error. Knows nothing of ONNX.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cachegraph.models.buckets import Bucket, BucketLadder
from cachegraph.models.cache_types import CacheTypes, check_raw_types, check_stored
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import (
    CacheKind,
    CachePart,
    CacheSpec,
    CarriedSpec,
    Contract,
    DType,
    Role,
    RowLayout,
    TensorRow,
)
from cachegraph.models.errors import ContractError
from cachegraph.models.planner_specs import PlannerSpecs, dims
from cachegraph.models.stages import check_device, check_stages

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class CacheEntry(_Part):
    """One cache; `layout` names an entry of `Manifest.layouts`."""

    name: str
    layer: int
    kind: CacheKind
    part: CachePart
    dtype: DType
    width: int


class GraphFile(_Part):
    """A static graph and the bucket it was frozen for."""

    file: str
    bucket: Bucket
    dims: dict[str, int]


class WeightsFile(_Part):
    """The one weights file; `header_sha256` is checked at each open, `sha256` on request."""

    file: str
    num_bytes: int
    header_sha256: str
    sha256: str


class NgramFile(WeightsFile):
    """The n-gram tables that the host holds, one tensor [rows, width] for each module in turn.

    A safetensors file. Rows of all heads of all modules stand side by side in the graph's input.
    """

    tensors: tuple[str, ...]
    dtype: DType
    rows: tuple[int, ...]
    width: int


class Exporter(_Part):
    """Who wrote the bundle, and how."""

    version: str
    options: dict[str, Any]


class DraftEntry(_Part):
    """The draft graph, on the same weights file; every field as the manifest's of that name.

    hidden: what the host carries of each sequence, the streams of its newest positions. The row of
    position p goes with the token at p + 1.
    """

    template: str
    planners: PlannerSpecs
    dimensions: dict[str, str]
    ladder: BucketLadder
    layouts: dict[CacheKind, RowLayout]
    caches: tuple[CacheEntry, ...]
    tensors: tuple[TensorRow, ...]
    hidden: CarriedSpec

    @property
    def contract(self) -> Contract:
        """The contract rows and cache specs of the draft graph."""
        return _contract(self.tensors, self.caches, self.layouts)

    def dims(self, bucket: Bucket) -> dict[str, int]:
        """Every dimension of one draft call by name."""
        return dims(self.planners, bucket)


class StageEntry(_Part):
    """The graph of layers first .. end - 1. device: where it runs unless the engine is told."""

    template: str
    first: int
    end: int
    device: str | None
    tensors: tuple[TensorRow, ...]

    @field_validator("device")
    @classmethod
    def _named(cls, device: str | None) -> str | None:
        if device is not None:
            check_device(device)
        return device


class Manifest(_Part):
    """The whole manifest. Dimension names in tensor shapes are explained by `dimensions`.

    template: the one graph, or the first of `stages`, which run one after another. tensors, caches:
    of the whole model either way.
    """

    format: Literal["cachegraph"] = "cachegraph"
    format_version: Literal[1] = 1
    exporter: Exporter
    family: str
    config: dict[str, Any]
    capacity: Capacity
    opset: int
    min_onnxruntime: str
    accuracy_level: int
    position_rule: Literal["consecutive", "ordered"]
    planners: PlannerSpecs
    dimensions: dict[str, str]
    ladder: BucketLadder
    layouts: dict[CacheKind, RowLayout]
    sentinels: dict[str, str]
    cache_types: CacheTypes
    caches: tuple[CacheEntry, ...]
    tensors: tuple[TensorRow, ...]
    template: str
    graphs: tuple[GraphFile, ...]
    weights: WeightsFile | None
    tokenizer: tuple[str, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int = Field(ge=1)
    draft: DraftEntry | None = None
    stages: tuple[StageEntry, ...] = ()
    ngram_tables: NgramFile | None = None

    @property
    def contract(self) -> Contract:
        """The contract rows and cache specs that the manifest describes."""
        return _contract(self.tensors, self.caches, self.layouts)

    def stage_contract(self, stage: StageEntry) -> Contract:
        """The contract of one stage: its rows, and the caches of its layers."""
        caches = self.contract.caches
        own = tuple(c for c in caches if stage.first <= c.layer < stage.end)
        return Contract(rows=stage.tensors, caches=own)

    def dims(self, bucket: Bucket) -> dict[str, int]:
        """Every dimension of one call by name."""
        return dims(self.planners, bucket)


def _contract(
    tensors: tuple[TensorRow, ...],
    caches: tuple[CacheEntry, ...],
    layouts: Mapping[CacheKind, RowLayout],
) -> Contract:
    specs = tuple(
        CacheSpec(
            layer=c.layer,
            kind=c.kind,
            part=c.part,
            dtype=c.dtype,
            width=c.width,
            layout=layouts[c.kind],
        )
        for c in caches
    )
    return Contract(rows=tensors, caches=specs)


def cache_entries(contract: Contract) -> tuple[CacheEntry, ...]:
    """The manifest form of a contract's caches."""
    return tuple(
        CacheEntry(
            name=c.name,
            layer=c.layer,
            kind=c.kind,
            part=c.part,
            dtype=c.dtype,
            width=c.width,
        )
        for c in contract.caches
    )


def cache_layouts(contract: Contract) -> dict[CacheKind, RowLayout]:
    """The row layout of every cache kind."""
    return {c.kind: c.layout for c in contract.caches}


def read_manifest(folder: Path) -> Manifest:
    """Read and check a bundle's manifest; ContractError says which field is wrong."""
    path = folder / MANIFEST_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ContractError(
            f"{folder} is no bundle: it has no {MANIFEST_NAME}; make one with `cachegraph export`"
        ) from None
    except NotADirectoryError:
        raise ContractError(f"{folder} is a file; a bundle is a folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ContractError(f"{path} is not JSON ({error}); export the bundle again") from None
    return parse_manifest(raw, str(path))


def parse_manifest(raw: object, where: str) -> Manifest:
    """Check a decoded manifest."""
    if not isinstance(raw, Mapping) or raw.get("format") != "cachegraph":
        raise ContractError(f"{where} is no cachegraph manifest; export the bundle again")
    version = raw.get("format_version")
    if version != FORMAT_VERSION:
        raise ContractError(
            f"{where} has format version {version!r}; this cachegraph reads {FORMAT_VERSION}; "
            "export the bundle again or install the version that wrote it"
        )
    check_raw_types(raw, where)
    if isinstance(draft := raw.get("draft"), Mapping):
        check_raw_types(draft, where)
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        fault = first["msg"].removeprefix("Value error, ")
        raise ContractError(
            f"{where}: field {field!r}: {fault} ({error.error_count()} faults in all); "
            "export the bundle again"
        ) from None
    graphs: list[Manifest | DraftEntry] = [manifest]
    if manifest.draft is not None:
        graphs.append(manifest.draft)
    for graph in graphs:
        _check_layouts(graph.caches, graph.layouts, where)
        check_stored(graph.contract.caches, manifest.cache_types, where)
    _check_tables(manifest, where)
    if manifest.stages:
        layers = [range(stage.first, stage.end) for stage in manifest.stages]
        parts = [manifest.stage_contract(stage) for stage in manifest.stages]
        check_stages(manifest.contract, layers, parts, where)
    return manifest


def _check_tables(manifest: Manifest, where: str) -> None:
    """ContractError unless the host has tables where the graph takes their rows, and fitting ones.

    A bundle without weights has none.
    """
    row = next((row for row in manifest.tensors if row.role is Role.TABLE), None)
    tables, specs = manifest.ngram_tables, manifest.planners.ngrams
    fault = ""
    if (row is None or manifest.weights is None) != (tables is None):
        fault = "n-gram tables of the host belong to a graph that takes their rows"
    elif row is not None and tables is not None:
        width = tables.width * sum(len(spec.primes) for spec in specs)
        needed = tuple(spec.table_rows for spec in specs)
        if not len(tables.tensors) == len(tables.rows) == len(specs):
            fault = f"{len(tables.tensors)} n-gram tables for {len(specs)} modules"
        elif width != row.shape[-1]:
            fault = (
                f"n-gram tables give {width} values of a token, {row.name} takes {row.shape}"
            )
        elif any(held < count for held, count in zip(tables.rows, needed, strict=True)):
            fault = f"n-gram tables of {tables.rows} rows, the hash names {needed}"
    if fault:
        raise ContractError(f"{where}: {fault}; export the bundle again")


def _check_layouts(
    caches: tuple[CacheEntry, ...], layouts: Mapping[CacheKind, RowLayout], where: str
) -> None:
    for cache in caches:
        if cache.kind not in layouts:
            raise ContractError(
                f"{where}: {cache.name} has no layout of {cache.kind.value} rows; export the "
                "bundle again"
            )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json; the last file of an export, so that a bundle without it is not one."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
