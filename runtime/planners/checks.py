"""What validation of any plan is made of. A PlanError names planner, field, position and bound."""

from __future__ import annotations

from typing import NoReturn

from cachegraph.models.errors import PlanError
from cachegraph.runtime.batch import IntArray

_SMALL = 16  # below this, a list in Python is faster than a numpy reduction


def in_range(planner: str, field: str, values: IntArray, bound: int) -> None:
    """PlanError unless every value is from 0 to `bound` - 1."""
    if not values.size:
        return
    if values.size <= _SMALL:
        items = values.tolist()
        low, high = min(items), max(items)
    else:
        low, high = int(values.min()), int(values.max())
    if low < 0 or high >= bound:
        at = int(((values < 0) | (values >= bound)).argmax())
        fail(planner, field, at, f"{values[at]} is outside 0 to {bound - 1}")


def distinct(planner: str, field: str, values: IntArray) -> None:
    """PlanError where a value stands twice."""
    items = values.tolist()
    if len(set(items)) == len(items):
        return
    first: dict[int, int] = {}
    for at, value in enumerate(items):
        if first.setdefault(value, at) != at:
            fail(planner, field, at, f"row {value} is written twice, first at {first[value]}")


def same(planner: str, field: str, got: int, wanted: int) -> None:
    """PlanError unless a field has as many entries as wanted."""
    if got != wanted:
        raise PlanError(
            f"{planner} plan: {field}: has {got} entries, wanted {wanted}; the graph was not run"
        )


def fail(planner: str, field: str, at: int, fault: str) -> NoReturn:
    """Raise the PlanError of one entry of a field."""
    raise PlanError(f"{planner} plan: {field}[{at}]: {fault}; the graph was not run")
