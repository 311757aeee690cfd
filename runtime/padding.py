"""Padding: logical plans become the fixed-size buffers of one bucket.

Every element of every host row is written in every step; what the unused part holds follows from
the row's padding rule and its cache layout, never from its name. What is filled in comes from
`plan_values.py`. Knows nothing of how plans are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.contract import OUT_ROWS, Contract, Padding, TensorRow
from cachegraph.models.errors import ContractError, PlanError
from cachegraph.models.planner_specs import PlannerSpecs
from cachegraph.runtime.batch import IntArray
from cachegraph.runtime.plan_values import sources
from cachegraph.runtime.planners.step import StepPlan

Rows = NDArray[np.float32]
_TOKENS = "T"  # rows whose first dim this is are stream-major: they are filled as [S, P, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """How one host row is padded. filler: first spare row, sentinel row, or 0."""

    name: str
    rule: Padding
    is_tokens: bool
    filler: int


class Filler:
    """Fills the plan buffers of a contract. Made once; keeps nothing of a step."""

    def __init__(self, contract: Contract, specs: PlannerSpecs) -> None:
        self._slots = tuple(_slot(contract, row) for row in contract.host_rows)
        self._sources = sources(contract, specs)
        named = {name for source in self._sources for name in source.names}
        found = {slot.name for slot in self._slots}
        unknown = (named ^ found) - {OUT_ROWS}  # a stage without a head has none
        if unknown:
            raise ContractError(
                f"host rows without a planner, or the reverse: {sorted(unknown)}"
            )

    def fill(
        self, dims: Mapping[str, int], step: StepPlan, buffers: Mapping[str, IntArray]
    ) -> None:
        """Write every element of every host row.

        dims: those of the chosen bucket. buffers: int64 by contract name, contiguous, of the shapes
        that the contract gives for these dims. PlanError where the plan does not fit the bucket.
        """
        size = (dims["S"], dims["P"])
        values = dict(self.values(dims, step))
        for slot in self._slots:
            buffer = buffers[slot.name]
            view = buffer.reshape(*size, *buffer.shape[1:]) if slot.is_tokens else buffer
            value = values[slot.name]
            if view.shape == value.shape:
                view[...] = value
            elif view.ndim == 1:
                _pad_list(slot, view, value)
            else:
                _pad_block(slot, view, value)

    def values(
        self, dims: Mapping[str, int], step: StepPlan
    ) -> Iterator[tuple[str, IntArray]]:
        """The logical value of every host row; rows of T as [s, p, ...]."""
        for source in self._sources:
            yield from zip(source.names, source.of(step, dims), strict=True)


def fill(
    contract: Contract,
    specs: PlannerSpecs,
    dims: Mapping[str, int],
    step: StepPlan,
    buffers: Mapping[str, IntArray],
) -> None:
    """`Filler.fill` for a single call; make a `Filler` where there are many."""
    Filler(contract, specs).fill(dims, step, buffers)


def fill_rows(buffer: Rows, rows: Rows, step: int, padded_step: int) -> None:
    """Place rows [S*p, width] of a ubatch in a buffer [S*P, width]; padded lanes hold zeros."""
    lanes = buffer.reshape(-1, padded_step, buffer.shape[1])
    block = rows.reshape(-1, step, rows.shape[1])
    lanes[: len(block), :step] = block
    lanes[: len(block), step:] = 0
    lanes[len(block) :] = 0


def _slot(contract: Contract, row: TensorRow) -> _Slot:
    filler = 0
    if row.spare_of is not None:
        layout = contract.layout(row.spare_of)
        is_spare = row.padding is Padding.SPARE
        filler = layout.spare_start if is_spare else layout.zero_sentinel
    is_tokens = row.shape[0] == _TOKENS
    return _Slot(name=row.name, rule=row.padding, is_tokens=is_tokens, filler=filler)


def _pad_list(slot: _Slot, view: IntArray, value: IntArray) -> None:
    count = value.size
    if count > view.size:
        _too_large(slot, view, value)
    view[:count] = value
    tail = view[count:]
    if slot.rule is Padding.SPARE:
        tail[...] = np.arange(slot.filler, slot.filler + tail.size)
    elif slot.rule is Padding.LAST:
        tail[...] = value[-1] if count else 0
    elif slot.rule in (Padding.ZERO, Padding.SENTINEL):
        tail[...] = slot.filler
    else:
        _too_large(slot, view, value)


def _pad_block(slot: _Slot, view: IntArray, value: IntArray) -> None:
    """Pad on the right of each stream's entries, then whole streams below."""
    rows, columns = value.shape[:2]
    if rows > view.shape[0] or columns > view.shape[1]:
        _too_large(slot, view, value)
    view[:rows, :columns] = value
    right, below = view[:rows, columns:], view[rows:]
    if slot.rule is Padding.SPARE:
        first = slot.filler + right.size
        right[...] = np.arange(slot.filler, first).reshape(right.shape)
        below[...] = np.arange(first, first + below.size).reshape(below.shape)
    elif slot.rule is Padding.LAST:
        right[...] = value[:, -1:]
        below[...] = view[rows - 1] if rows else 0
    elif slot.rule in (Padding.ZERO, Padding.SENTINEL):
        right[...] = slot.filler
        below[...] = slot.filler
    else:
        _too_large(slot, view, value)


def _too_large(slot: _Slot, view: IntArray, value: IntArray) -> NoReturn:
    raise PlanError(
        f"{slot.name}: the plan has {value.shape} entries, the bucket {view.shape}; "
        "a larger bucket is needed"
    )
