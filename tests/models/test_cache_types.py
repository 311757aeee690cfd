"""Cache types: which there are, what each stores, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from support.tiny import tiny_config

from cachegraph.models.cache_types import CacheType, CacheTypes, check_stored, stored_parts
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, CacheSpec, DType
from cachegraph.models.deepseek_v4.contract import caches
from cachegraph.models.errors import ConfigError, ContractError
from cachegraph.models.export_options import ExportOptions

pytestmark = pytest.mark.r0
SIZES = {"head_dim": 96, "index_head_dim": 160}
BYTES = {CacheType.F32: 4.0, CacheType.F16: 2.0, CacheType.BF16: 2.0, CacheType.Q8_0: 34 / 32}


def specs_of(rows: CacheType, index: CacheType) -> tuple[CacheSpec, ...]:
    types = CacheTypes(rows=rows, index=index)
    return caches(tiny_config(**SIZES), Capacity(context=100, sequences=3), types)


@pytest.mark.parametrize(("rows", "index"), list(product(CacheType, CacheType)))
def test_bytes_follow_the_types_and_states_stay_f32(rows: CacheType, index: CacheType) -> None:
    plain, specs = specs_of(CacheType.F32, CacheType.F32), specs_of(rows, index)
    for spec in plain:
        parts = [s for s in specs if (s.layer, s.kind) == (spec.layer, spec.kind)]
        form = index if spec.kind is CacheKind.LID else rows
        wanted = 4.0 if spec.kind.is_state else BYTES[form]
        assert sum(s.num_bytes for s in parts) == spec.layout.rows * spec.width * wanted
        assert parts[0].name == spec.name
        assert {s.layout for s in parts} == {spec.layout}
    assert len({s.name for s in specs}) == len(specs)


def test_q8_0_is_codes_and_scales() -> None:
    raw = [s for s in specs_of(CacheType.Q8_0, CacheType.F16) if s.kind is CacheKind.RAW][:2]
    found = [(s.name, s.out_name, s.dtype, s.width) for s in raw]
    assert found == [
        ("cache.0.raw", "cache.0.raw.out", DType.INT8, 96),
        ("cache.0.raw.scales", "cache.0.raw.scales.out", DType.FLOAT16, 3),
    ]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"cache": "q4_0"},
            r"raw, csa and hca cache: no type 'q4_0'; .* f32, f16, bf16, q8_0",
        ),
        ({"index_cache": "f64"}, r"lid cache: no type 'f64'; .* f32, f16, bf16, q8_0"),
        ({"cache": None}, r"raw, csa and hca cache: no type None"),
    ],
)
def test_a_type_outside_the_list_is_refused(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExportOptions(**choice)


def test_a_name_serves_as_a_type() -> None:
    types = ExportOptions(cache="q8_0", index_cache="f16").cache_types
    assert (types.rows, types.index) == (CacheType.Q8_0, CacheType.F16)
    assert isinstance(types.rows, CacheType)


@pytest.mark.parametrize("width", [1, 31, 33, 100])
def test_q8_0_wants_whole_blocks(width: int) -> None:
    message = rf"hca cache: q8_0 .* blocks of 32 values, and the width {width} is no multiple"
    with pytest.raises(ConfigError, match=message):
        stored_parts(CacheKind.HCA, CacheType.Q8_0, width)


def test_a_model_with_an_odd_width_names_its_first_cache() -> None:
    types = CacheTypes(index=CacheType.Q8_0)
    with pytest.raises(ConfigError, match=r"lid cache: .* the width 14 is no multiple"):
        caches(tiny_config(), Capacity(), types)


def test_stored_caches_must_be_those_of_the_types() -> None:
    """A missing part, another type of a state ring, a type of its own for HCA."""
    types = CacheTypes(rows=CacheType.Q8_0)
    specs = specs_of(CacheType.Q8_0, CacheType.F32)
    check_stored(specs, types, "here")
    faults = {
        "cache.1.csa.scales": [s for s in specs if s.name != "cache.1.csa.scales"],
        "cache.1.csa_state": [as_type(s, "cache.1.csa_state", DType.FLOAT16) for s in specs],
        "cache.2.hca": [
            as_type(s, "cache.2.hca", DType.FLOAT32)
            for s in specs
            if s.name != "cache.2.hca.scales"
        ],
    }
    for name, broken in faults.items():
        with pytest.raises(ContractError, match=rf"here: {name}: the manifest has "):
            check_stored(broken, types, "here")


def as_type(spec: CacheSpec, name: str, dtype: DType) -> CacheSpec:
    return replace(spec, dtype=dtype) if spec.name == name else spec
