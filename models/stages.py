"""Stages: a model cut into runs of layers, each a graph that hands its streams to the next.

Knows contracts, not families: which rows a stage needs follows from the caches of its layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from cachegraph.models.contract import (
    CARRIED,
    OUT_ROWS,
    STREAMS,
    Contract,
    DType,
    Planner,
    Role,
    TensorRow,
    cache_rows,
)
from cachegraph.models.errors import ConfigError, ContractError
from cachegraph.models.plan_fields import CompressorFields, plan_name

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def check_split(split: Sequence[int], devices: Sequence[str]) -> None:
    """ConfigError for a stage without layers, or for devices that do not fit the stages."""
    if any(count < 1 for count in split):
        raise ConfigError(f"--split {_listed(split)}: every stage needs 1 layer or more")
    if devices and not split:
        raise ConfigError("--devices needs --split: one graph runs where the engine is opened")
    if devices and len(devices) != len(split):
        raise ConfigError(
            f"--devices names {len(devices)} for {len(split)} stages of --split; name one a stage"
        )
    for device in devices:
        check_device(device)


def check_device(name: str) -> None:
    """ConfigError for what names no device; whether it is there is the runtime's question."""
    if not _DEVICE.fullmatch(name):
        raise ConfigError(f"no device {name!r}; there are cpu, cuda, cuda:1 and so on")


def stage_layers(split: Sequence[int], num_layers: int) -> tuple[range, ...]:
    """The layers of each stage; ConfigError where the split does not hold the model's layers."""
    if sum(split) != num_layers:
        raise ConfigError(
            f"--split {_listed(split)} makes {sum(split)} layers; the model has {num_layers}"
        )
    ends = accumulate(split, initial=0)
    return tuple(range(first, end) for first, end in pairwise(ends))


def stage_contract(whole: Contract, layers: range, width: int) -> Contract:
    """The rows of one stage of a model. width: values of a token's residual streams.

    Every stage but the first takes them from the one before, every stage but the last gives them.
    """
    caches = tuple(spec for spec in whole.caches if spec.layer in layers)
    is_last = layers.stop > max(spec.layer for spec in whole.caches)
    kinds = {spec.kind for spec in caches}
    plans = {plan_name(kind, field) for kind in kinds for field in CompressorFields._fields}
    streams = _streams_row(STREAMS, width, is_output=True)
    hosted = [
        row
        for row in whole.host_rows
        if row.name in plans
        or row.planner is Planner.RAW
        or (row.planner is Planner.BATCH and (is_last or row.name != OUT_ROWS))
    ]
    carried = [] if layers.start == 0 else [_streams_row(CARRIED, width, is_output=False)]
    given = [row for row in whole.outputs if row.role is Role.RESULT] if is_last else [streams]
    sides, half = cache_rows(caches), len(caches)
    return Contract(
        rows=(*hosted, *carried, *sides[:half], *given, *sides[half:]), caches=caches
    )


def check_stages(
    whole: Contract, layers: Sequence[range], parts: Sequence[Contract], where: str
) -> None:
    """ContractError unless stages hold every layer once, in order, and each fits the next.

    layers: of each stage; parts: its rows, with the caches that its layers have in the whole.
    """
    num_layers = 1 + max(spec.layer for spec in whole.caches)
    bounds = [0, *(own.stop for own in layers)]
    if [own.start for own in layers] != bounds[:-1] or bounds[-1] != num_layers:
        listed = ", ".join(f"{own.start} to {own.stop - 1}" for own in layers)
        raise ContractError(
            f"{where}: the stages hold layers {listed}, wanted 0 to {num_layers - 1} in order, "
            "each once; export the bundle again"
        )
    given: TensorRow | None = None
    for number, part in enumerate(parts):
        caches = tuple(row for row in part.rows if row.role is Role.CACHE)
        taken = _row(part.inputs, CARRIED)
        if caches != cache_rows(part.caches) or _form(taken) != _form(given):
            raise ContractError(
                f"{where}: stage {number} does not have the caches of its layers, or not the "
                "streams that the stage before gives; export the bundle again"
            )
        given = _row(part.outputs, STREAMS)


def _row(rows: Sequence[TensorRow], name: str) -> TensorRow | None:
    return next((row for row in rows if row.name == name), None)


def _form(row: TensorRow | None) -> tuple[object, ...]:
    return () if row is None else (row.dtype, row.shape)


def _streams_row(name: str, width: int, *, is_output: bool) -> TensorRow:
    return TensorRow(
        name=name,
        dtype=DType.FLOAT32,
        shape=("T", width),
        role=Role.RESULT if is_output else Role.CARRIED,
        is_output=is_output,
        meaning="residual streams of each token between two stages",
    )


def _listed(split: Sequence[int]) -> str:
    return ",".join(str(count) for count in split)
