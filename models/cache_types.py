"""How cache rows are stored: the types a user may choose, and the buffers that each one makes.

Attention rows (raw, CSA, HCA, keys, values) share one type, indexer keys have their own, states
stay f32. Knows no model and no graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Any, NamedTuple

from cachegraph.models.contract import CacheKind, CachePart, CacheSpec, DType, RowLayout
from cachegraph.models.errors import ConfigError, ContractError

Q8_BLOCK = 32  # values of a row that share one scale


class CacheType(StrEnum):
    """How the rows of a cache are stored."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"  # int8 codes, and one f16 scale for 32 values


_FLOATS = {
    CacheType.F32: DType.FLOAT32,
    CacheType.F16: DType.FLOAT16,
    CacheType.BF16: DType.BFLOAT16,
}


_INDEX_KINDS = (CacheKind.LID, CacheKind.INDEX, CacheKind.POOLED)


class StoredPart(NamedTuple):
    """One buffer of a cache."""

    part: CachePart
    dtype: DType
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTypes:
    """The types of a bundle. ConfigError names kinds, type and allowed types.

    rows: of attention rows. index: of the indexer's keys. A type's name serves as well.
    """

    rows: CacheType = CacheType.F32
    index: CacheType = CacheType.F32

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", named_type("raw, csa and hca", self.rows))
        object.__setattr__(self, "index", named_type("lid", self.index))

    def of(self, kind: CacheKind) -> CacheType:
        """The type of a cache kind."""
        if kind.is_state:
            return CacheType.F32
        return self.index if kind in _INDEX_KINDS else self.rows


def named_type(
    kinds: str, value: object, allowed: Sequence[CacheType] = tuple(CacheType)
) -> CacheType:
    """The type of this name; ConfigError names kinds, type and allowed types."""
    if value not in allowed:
        raise ConfigError(
            f"{kinds} cache: no type {value!r}; it can be {', '.join(allowed)}; choose one"
        )
    return CacheType(str(value))


def stored_parts(kind: CacheKind, cache_type: CacheType, width: int) -> tuple[StoredPart, ...]:
    """The buffers of a cache whose rows hold `width` values.

    ConfigError where q8_0 cannot cut a row into whole blocks.
    """
    if cache_type != CacheType.Q8_0:
        return (StoredPart(CachePart.VALUES, _FLOATS[cache_type], width),)
    if width % Q8_BLOCK:
        raise ConfigError(
            f"{kind.value} cache: q8_0 stores rows in blocks of {Q8_BLOCK} values, and the "
            f"width {width} is no multiple of it; choose f32, f16 or bf16"
        )
    return (
        StoredPart(CachePart.VALUES, DType.INT8, width),
        StoredPart(CachePart.SCALES, DType.FLOAT16, width // Q8_BLOCK),
    )


def cache_specs(
    layer: int, kind: CacheKind, cache_type: CacheType, width: int, layout: RowLayout
) -> tuple[CacheSpec, ...]:
    """The contract's entries of one cache, the values first."""
    return tuple(
        CacheSpec(layer=layer, kind=kind, part=part, dtype=dtype, width=stored, layout=layout)
        for part, dtype, stored in stored_parts(kind, cache_type, width)
    )


def type_of(values: DType) -> CacheType:
    """The type of a cache by how its values are stored."""
    return next((form for form, dtype in _FLOATS.items() if dtype is values), CacheType.Q8_0)


def check_raw_types(raw: Mapping[str, Any], where: str) -> None:
    """ContractError for a type outside the lists in a decoded manifest: kind, type, allowed types.

    What is missing or of another shape is left to the schema.
    """
    types, entries = raw.get("cache_types"), raw.get("caches")
    try:
        if isinstance(types, Mapping) and types.keys() <= {"rows", "index"}:
            CacheTypes(**types)
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, Mapping) and entry.get("dtype", DType.INT8) not in list(
                DType
            ):
                kind = str(entry.get("kind"))
                allowed = [CacheType.F32] if kind.endswith("_state") else tuple(CacheType)
                named_type(f"layer {entry.get('layer')} {kind}", entry["dtype"], allowed)
    except ConfigError as error:
        raise ContractError(f"{where}: {error}, and export the bundle again") from None


def check_stored(specs: Iterable[CacheSpec], types: CacheTypes, where: str) -> None:
    """ContractError unless every cache has the parts of its type, in order and of their widths."""
    found = tuple(specs)
    wanted: tuple[CacheSpec, ...] = ()
    try:
        for spec in found:
            if spec.part is CachePart.VALUES:
                form = types.of(spec.kind)
                wanted += cache_specs(spec.layer, spec.kind, form, spec.width, spec.layout)
    except ConfigError as error:
        raise ContractError(f"{where}: {error}, and export the bundle again") from None
    for ours, theirs in zip_longest(found, wanted):
        named = theirs or ours
        if ours != theirs and named is not None:
            raise ContractError(
                f"{where}: {named.name}: the manifest has {_words(ours)}, a {named.kind.value} "
                f"cache of type {types.of(named.kind).value} is {_words(theirs)}; export the "
                "bundle again"
            )


def _words(spec: CacheSpec | None) -> str:
    return (
        "no such part" if spec is None else f"{spec.name} of {spec.width} {spec.dtype.value}"
    )
