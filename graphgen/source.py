"""What export needs to know of a model, whatever its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from cachegraph.graphgen.template import Emit
from cachegraph.graphgen.weights.parameter import Read, Weight
from cachegraph.models.buckets import BucketLadder
from cachegraph.models.contract import CarriedSpec, Contract
from cachegraph.models.planner_specs import PlannerSpecs


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSource:
    """The draft graph of a model. Its weights may share bytes with the main graph's."""

    contract: Contract
    planners: PlannerSpecs
    ladder: BucketLadder
    hidden: CarriedSpec
    emit: Emit


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSource:
    """One stage of a split model: its layers, its rows, and where it runs by default."""

    layers: range
    contract: Contract
    device: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """One model ready to be built.

    emit: adds the nodes of a contract's layers to a graph. stages: empty for one graph. tables:
    n-gram tables of the host, [rows, width] each, which are in no graph.
    open_read: opens the checkpoint and returns the function that reads one tensor as f32 (or
    int64).
    """

    family: str
    config: Mapping[str, object]
    contract: Contract
    planners: PlannerSpecs
    ladder: BucketLadder
    sentinels: Mapping[str, str]
    position_rule: Literal["consecutive", "ordered"]
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    emit: Emit
    draft: DraftSource | None
    stages: tuple[StageSource, ...]
    open_read: Callable[[], Read]
    tables: tuple[Weight, ...] = ()
