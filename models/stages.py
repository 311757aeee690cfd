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
from cachegraph.models.errors import ConfigError
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
        if not _DEVICE.fullmatch(device):
            raise ConfigError(f"no device {device!r}; there are cpu, cuda, cuda:1 and so on")


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
