"""Names and dimensions of the plan inputs of pooled keys and recurrent states."""

from __future__ import annotations

import dataclasses

import pytest
from support.pool_world import pooled_spec

from cachegraph.models.buckets import Bucket
from cachegraph.models.contract import CacheKind
from cachegraph.models.planner_specs import PlannerSpecs, dims
from cachegraph.models.pooled_fields import PooledFields, pooled_name, pooled_rows
from cachegraph.models.pooled_spec import pooled_dims, pooled_formulas
from cachegraph.models.recurrent_spec import RecurrentSpec, recurrent_rows

pytestmark = pytest.mark.r0


def test_names_are_those_of_the_fields() -> None:
    names = [pooled_name(field) for field in PooledFields._fields]
    assert names[:3] == ["plan.pool.k_idxs", "plan.pool.pool_cells", "plan.pool.pool_idxs"]


def test_every_dimension_of_an_input_is_a_number_of_the_call() -> None:
    spec = dataclasses.replace(pooled_spec(5), cells=203, sequences=6)
    bucket = Bucket(streams=3, step=7, context=40)
    sizes = pooled_dims(spec, bucket)
    assert sizes == {"NG": 40, "MG": 200, "BG": 7}
    assert pooled_formulas(spec).keys() == sizes.keys()
    specs = PlannerSpecs(pooled=spec, recurrent=RecurrentSpec(snapshots=4), context_unit=5)
    rows = (*pooled_rows(spec), *recurrent_rows(CacheKind.CONV_STATE))
    used = {dim for row in rows for dim in row.shape if isinstance(dim, str)}
    assert used <= dims(specs, bucket).keys()


def test_pools_of_an_edit_are_counted_beside_those_of_the_step() -> None:
    spec = dataclasses.replace(pooled_spec(5), cells=203, sequences=6)
    made = [
        pooled_dims(spec, Bucket(streams=3, step=7, context=40, repooled=count))["BG"]
        for count in (0, 64, 512)
    ]
    assert made == [7, 71, 240]  # 40 pools of each sequence


def test_a_query_attends_to_its_pools_and_the_tail() -> None:
    spec = pooled_spec(5)
    assert (spec.top_pools, spec.tail_rows, spec.selected) == (2, 4, 14)
