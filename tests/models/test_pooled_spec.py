"""Names and dimensions of the plan inputs of pooled keys and recurrent states."""

from __future__ import annotations

import pytest
from support.pool_world import pooled_spec

from cachegraph.models.buckets import Bucket
from cachegraph.models.pooled_fields import POOLED_INPUTS, PooledFields, pooled_name
from cachegraph.models.pooled_spec import pooled_dims, pooled_formulas

pytestmark = pytest.mark.r0


def test_names_are_those_of_the_fields() -> None:
    names = [pooled_name(field) for field in PooledFields._fields]
    assert names[:3] == ["plan.pool.k_idxs", "plan.pool.pool_cells", "plan.pool.pool_idxs"]


def test_every_dimension_of_an_input_is_a_number_of_the_call() -> None:
    spec, bucket = pooled_spec(5), Bucket(streams=3, step=7, context=40)
    sizes = pooled_dims(spec, bucket, cells=203, sequences=6)
    assert sizes == {"G": 5, "NG": 40, "BG": 7, "KG": 2, "L": 4}
    assert pooled_formulas(spec).keys() == sizes.keys()
    used = {dim for row in POOLED_INPUTS for dim in row.shape if isinstance(dim, str)}
    assert used <= {"T"} | sizes.keys()


def test_a_query_attends_to_its_pools_and_the_tail() -> None:
    spec = pooled_spec(5)
    assert (spec.top_pools, spec.tail_rows, spec.selected) == (2, 4, 14)
