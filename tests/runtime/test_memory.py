"""The memory report: known before anything is allocated, and what is allocated then."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from support.engines import Engines
from support.tiny import tiny_config

from cachegraph.models.cache_types import CacheType, CacheTypes
from cachegraph.models.capacity import Capacity
from cachegraph.models.deepseek_v4.contract import contract
from cachegraph.models.errors import ConfigError
from cachegraph.runtime.checkpoint_book import Mode
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.memory import memory_report

SIZES = {"head_dim": 96, "index_head_dim": 160}  # whole blocks of 32
TYPES = [(form, form) for form in CacheType] + [(CacheType.F16, CacheType.Q8_0)]


def allocated(engine: Engine) -> dict[str, int]:
    """Bytes of every real buffer, by cache kind and kind of copy."""
    found: Counter[str] = Counter()
    for spec in engine.manifest.contract.caches:
        found[spec.kind.value] += engine._store.caches[spec.name].array.nbytes
    copies, mode = engine.checkpoints._copies, engine.checkpoints.mode
    base = "base" if mode is Mode.DELTA else mode.value
    for name, buffers in ((base, copies._base), ("delta", copies._delta)):
        for buffer in buffers.values():
            found[name] += buffer.array.nbytes
    for array in copies._host.values():
        found["host"] += array.nbytes
    return dict(found)


@pytest.mark.r2
@pytest.mark.parametrize(("rows", "index"), TYPES, ids=lambda form: form.value)
def test_bytes_of_every_mode_and_type_are_those_allocated(
    engines: Engines, rows: CacheType, index: CacheType
) -> None:
    engine = engines.get(sizes=SIZES, cache=rows, index_cache=index)
    for mode, tokens in ((Mode.RING, 8), (Mode.DELTA, 3), (Mode.SHADOW, 5), (Mode.HOST, 5)):
        promised = engine.checkpoints.report(mode, tokens)
        held = engine.memory.total - sum(engine.memory.copies.values())
        engine.checkpoints.prepare(mode, tokens)
        report = engine.memory
        assert report.copies == promised == engine.checkpoints.num_bytes
        assert report.breakdown() == {"cpu": allocated(engine)}
        assert report.total == sum(allocated(engine).values())
        assert report.total == held + sum(promised.values())
    engine.checkpoints.release()
    assert engine.memory.copies == {}


@pytest.mark.r2
def test_asking_allocates_nothing_and_names_the_limit(engine: Engine) -> None:
    before = allocated(engine)
    assert engine.checkpoints.report("host") == {"host": sum(states(engine).values())}
    assert engine.checkpoints.report("ring") == {}
    with pytest.raises(ConfigError, match=r"delta checkpoint takes 1 to 8 tokens .* not 9"):
        engine.checkpoints.report("delta", 9)
    assert allocated(engine) == before
    assert engine.checkpoints.mode is Mode.RING


def states(engine: Engine) -> dict[str, int]:
    """Bytes of each state ring's live rows."""
    return {
        spec.name: spec.layout.live_rows * spec.width * 4
        for spec in engine.manifest.contract.caches
        if spec.kind.is_state
    }


@pytest.mark.r2
def test_growing_a_checkpoint_grows_the_report(engine: Engine) -> None:
    engine.checkpoints.prepare("delta", 2)
    engine.checkpoints.prepare("delta", 7)
    assert engine.memory.copies == engine.checkpoints.report("delta", 7)
    assert engine.memory.breakdown() == {"cpu": allocated(engine)}
    engine.checkpoints.release()


@pytest.mark.r0
def test_copies_stand_by_their_states_but_for_those_of_mode_host() -> None:
    """All copies of a device live there; mode `host` is host memory wherever the caches are."""
    rows = contract(tiny_config(), Capacity(context=100, sequences=3))
    cuda = {spec.layer: "cuda" for spec in rows.caches}
    copies = {1: {"base": 70, "delta": 5}, 2: {"base": 30}}
    found = memory_report(rows, cuda, copies).breakdown()
    assert found.keys() == {"cuda"}
    assert (found["cuda"]["base"], found["cuda"]["delta"]) == (100, 5)
    found = memory_report(rows, {**cuda, 2: "cuda:1"}, copies).breakdown()
    assert (found["cuda"]["base"], found["cuda:1"]["base"]) == (70, 30)
    found = memory_report(rows, cuda, {1: {"host": 70}}).breakdown()
    assert found["cpu"] == {"host": 70}
    assert "host" not in found["cuda"]


@pytest.mark.r0
@pytest.mark.parametrize("form", CacheType)
def test_the_line_names_each_kind_with_the_type_it_is_held_in(form: CacheType) -> None:
    types = CacheTypes(rows=form, index=CacheType.Q8_0)
    rows = contract(tiny_config(**SIZES), Capacity(context=100, sequences=3), types)
    line = memory_report(rows).line()
    for part in ("csa 25", "hca 9"):
        assert f"{part} rows {form.value}" in line
    assert "lid 25 rows q8_0" in line
    assert "csa_state 16 rows f32" in line
    assert line.endswith("MiB in all, 3 streams")


@pytest.mark.r2
def test_preparing_logs_its_bytes(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine.checkpoints.prepare("delta", 4)
    sizes = engine.checkpoints.report("delta", 4)
    for name, size in sizes.items():
        assert f"{name} {size / 2**20:.2f} MiB" in caplog.text
    engine.checkpoints.release()
