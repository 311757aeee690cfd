"""Rule 6 on a running engine: caches change in place, only in rows that the plan names.

That every emitted graph allows it is proved in tests/graphgen; here is what ONNX Runtime
makes of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from support import graphs
from support.bundles import Bundles
from support.engines import Call, Engines, changed_rows, feed, snapshot, watched

from cachegraph.models.contract import CacheKind
from cachegraph.models.manifest import read_manifest
from cachegraph.runtime.engine import Engine

# Prefills, single tokens, closing blocks of both ratios, padded lanes and padded streams.
STEPS = ({0: 30, 3: 2}, {1: 11}, {0: 1, 1: 1, 3: 1}, {0: 2, 1: 5, 2: 24, 3: 9}, {2: 1}, {3: 3})
pytestmark = pytest.mark.r2
LOWERINGS: tuple[dict[str, Any], ...] = (
    {},
    {"dialect": "ort"},
    {"gather": "elements", "scatter": "elements"},
    {"gather": "nd"},
    {"select": "mask", "experts": "all"},
)


@pytest.mark.parametrize("choices", LOWERINGS)
def test_a_step_writes_only_the_rows_that_its_plan_names(
    engines: Engines, choices: dict[str, Any]
) -> None:
    engine = engines.get(**choices)
    specs = engine.manifest.contract.caches
    addresses = {
        spec.name: engine._store.caches[spec.name].array.ctypes.data for spec in specs
    }
    taken = snapshot(engine)
    written: set[CacheKind] = set()

    def check(call: Call) -> None:
        nonlocal taken
        now = snapshot(engine)
        for spec in specs:
            named = set(call.written(spec).tolist())
            changed = changed_rows(spec, taken, now)
            assert changed <= named, spec.name
            if changed:
                written.add(spec.kind)
        taken = now

    with watched(engine, after=check):
        for counts in STEPS:  # of texts that no other test leaves in the caches
            feed(engine, counts, texts={seq: seq + 10 for seq in counts})
    assert written == set(engine.manifest.layouts)
    for spec in specs:
        assert engine._store.caches[spec.name].value.data_ptr() == addresses[spec.name]


def test_the_output_of_every_cache_is_its_input(engine: Engine) -> None:
    feed(engine, {0: 5})
    contract = engine.manifest.contract
    names = [row.name for row in contract.rows if row.is_output]
    for call in engine._graph.calls.values():
        bound = {value.data_ptr() for value in call.binding.get_outputs()}
        assert len(bound) == len(names)
        assert {
            engine._store.caches[spec.name].array.ctypes.data for spec in contract.caches
        } < bound


@pytest.mark.parametrize("dialect", ["portable", "ort"])
def test_what_onnxruntime_makes_of_a_graph_is_alias_safe(
    bundles: Bundles, tmp_path: Path, dialect: str
) -> None:
    bundle = bundles.bundle(bundles.checkpoint(), dialect=dialect)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(bundle / "template.onnx", options, ["CPUExecutionProvider"])
    model = graphs.load(tmp_path / "optimized.onnx")
    caches = {spec.name: spec.out_name for spec in read_manifest(bundle).contract.caches}
    assert graphs.alias_hazards(model, caches) == []
