"""Which bytes in the files hold which tensor of the model; every fault found in one pass.

Knows names, shapes and storage forms; reads no tensor data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

from cachegraph.graphgen.weights.dequant import (
    FLOAT_DTYPES,
    FP4_DTYPES,
    FP8_DTYPE,
    SCALE_DTYPES,
    fp4_shapes,
    fp8_grid,
)
from cachegraph.graphgen.weights.files import Entry
from cachegraph.models.errors import CheckpointError
from cachegraph.models.tensor_specs import (
    PACKED_KINDS,
    Fused,
    TensorKind,
    TensorSpec,
    TensorTable,
)

_LISTED = 20  # faults of one sort that are spelled out


class Form(StrEnum):
    """How a tensor is stored."""

    FLOAT = "float"
    FP8 = "fp8"
    FP8_SHARED = "fp8_shared"  # one scale for all of an n-gram table
    FP4 = "fp4"
    INTEGER = "integer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The bytes of one tensor: its entry, the first item if it is a part of it, and its scales."""

    spec: TensorSpec
    entry: Entry
    form: Form
    first_item: int = 0
    scale: Entry | None = None


@dataclass(kw_only=True, slots=True)
class _Faults:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def match_tensors(
    table: TensorTable, entries: Mapping[str, Entry], where: str
) -> dict[str, Source]:
    """The source of every tensor of the model, by our name.

    CheckpointError that lists all missing, unexpected and mis-shaped tensors, or says which tensors
    belong to another architecture.
    """
    faults = _Faults()
    named = _by_our_name(table, entries, faults)
    sources = _split_fused(table, named, faults)
    for spec in table.specs:
        if spec.name in sources:
            continue
        if spec.name not in named:
            faults.missing.append(f"{spec.name} {list(spec.shape)}")
        elif source := _source(spec, table.scale(spec), named, faults):
            sources[spec.name] = source
    shared = {source.scale.name for source in sources.values() if source.scale is not None}
    faults.unexpected += [
        entry.name
        for name, entry in named.items()
        if not table.is_left_out(name) and entry.name not in shared
    ]
    _raise(faults, where, table.family)
    return {spec.name: sources[spec.name] for spec in table.specs}


def _by_our_name(
    table: TensorTable, entries: Mapping[str, Entry], faults: _Faults
) -> dict[str, Entry]:
    named: dict[str, Entry] = {}
    for entry in entries.values():
        name = table.canonical(entry.name)
        why = table.refusal(name)
        if why is not None:
            faults.refused.append(f"{entry.name}: {why}")
        elif name in named:
            faults.unexpected.append(f"{entry.name}: the same tensor as {named[name].name}")
        else:
            named[name] = entry
    return named


def _split_fused(
    table: TensorTable, named: dict[str, Entry], faults: _Faults
) -> dict[str, Source]:
    """Sources of experts that lie in one tensor per layer. Takes those tensors out of `named`."""
    found = {name: fused for name in named if (fused := table.fused(name)) is not None}
    sources: dict[str, Source] = {}
    for name, fused in found.items():
        entry = named.pop(name)
        if entry.shape == fused.shape and entry.dtype in FLOAT_DTYPES:
            sources |= _parts(entry, fused)
        else:
            faults.misshaped.append(_mismatch(entry, fused.shape, FLOAT_DTYPES))
    return sources


def _parts(entry: Entry, fused: Fused) -> dict[str, Source]:
    _, rows, columns = fused.shape
    return {
        part.name: Source(
            spec=TensorSpec(
                name=part.name, shape=(part.num_rows, columns), kind=TensorKind.EXPERT
            ),
            entry=entry,
            form=Form.FLOAT,
            first_item=(part.expert * rows + part.first_row) * columns,
        )
        for part in fused.parts
    }


def _source(
    spec: TensorSpec, scale_name: str, named: dict[str, Entry], faults: _Faults
) -> Source | None:
    """The source of a tensor with an entry of its own. Takes entry and scale out of `named`.

    A scale that many tensors share stays there.
    """
    entry = named.pop(spec.name)
    form = _form(spec, entry)
    if form is None:
        faults.misshaped.append(_mismatch(entry, spec.shape, _dtypes(spec.kind)))
        named.pop(scale_name, None)
        return None
    if form in (Form.FLOAT, Form.INTEGER):
        return Source(spec=spec, entry=entry, form=form)
    shape = _scale_shape(spec, form)
    take = named.get if form is Form.FP8_SHARED else named.pop
    scale = take(scale_name, None)
    if scale is None:
        faults.missing.append(f"{scale_name} {list(shape)}")
        return None
    is_scalar = form is Form.FP8_SHARED and scale.shape == ()
    if not (is_scalar or scale.shape == shape) or scale.dtype not in SCALE_DTYPES:
        faults.misshaped.append(_mismatch(scale, shape, SCALE_DTYPES))
        return None
    return Source(spec=spec, entry=entry, form=form, scale=scale)


def _scale_shape(spec: TensorSpec, form: Form) -> tuple[int, ...]:
    if form is Form.FP8_SHARED:
        return (1,)
    rows, columns = spec.shape
    return fp8_grid(rows, columns) if form is Form.FP8 else fp4_shapes(rows, columns)[1]


def _form(spec: TensorSpec, entry: Entry) -> Form | None:
    """How an entry stores a tensor; None where dtype or shape do not fit."""
    is_whole = entry.shape == spec.shape
    if spec.kind is TensorKind.TABLE:
        return Form.INTEGER if is_whole and entry.dtype in ("I64", "I32") else None
    if entry.dtype in FLOAT_DTYPES:
        return Form.FLOAT if is_whole else None
    if spec.kind is TensorKind.NGRAM:
        return Form.FP8_SHARED if is_whole and entry.dtype == FP8_DTYPE else None
    if spec.kind not in PACKED_KINDS:
        return None
    if entry.dtype == FP8_DTYPE:
        return Form.FP8 if is_whole else None
    if spec.kind is TensorKind.EXPERT and entry.dtype in FP4_DTYPES:
        rows, columns = spec.shape
        packed = fp4_shapes(rows, columns)[0]
        return Form.FP4 if columns % 2 == 0 and entry.shape == packed else None
    return None


def _dtypes(kind: TensorKind) -> tuple[str, ...]:
    if kind is TensorKind.TABLE:
        return ("I64", "I32")
    packed = (FP8_DTYPE,) if kind in (*PACKED_KINDS, TensorKind.NGRAM) else ()
    return FLOAT_DTYPES + packed + (("I8 of packed FP4",) if kind is TensorKind.EXPERT else ())


def _mismatch(entry: Entry, shape: Iterable[int], dtypes: Iterable[str]) -> str:
    return (
        f"{entry.name} is {entry.dtype} {list(entry.shape)}, wanted {list(shape)} as "
        f"{' or '.join(dtypes)}"
    )


def _raise(faults: _Faults, where: str, family: str) -> None:
    if faults.refused:
        shown = _lines("another architecture", faults.refused)
        raise CheckpointError(f"{where} is not a {family} text model:{shown}")
    lists = (faults.missing, faults.unexpected, faults.misshaped)
    if any(lists):
        sorts = zip(("missing", "unexpected", "mis-shaped"), lists, strict=True)
        shown = "".join(_lines(sort, lines) for sort, lines in sorts if lines)
        raise CheckpointError(
            f"the tensors in {where} do not match its config.json:{shown}\n"
            "  take config.json and weights from one revision of one checkpoint"
        )


def _lines(sort: str, lines: list[str]) -> str:
    more = [f"... and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return f"\n  {sort} ({len(lines)}):" + "".join(
        f"\n    {line}" for line in lines[:_LISTED] + more
    )


def num_items(source: Source) -> int:
    """Stored items of a source: elements, or bytes where two share one."""
    count = prod(source.spec.shape)
    return count // 2 if source.form is Form.FP4 else count
