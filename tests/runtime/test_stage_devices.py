"""A split model on several devices: each buffer is used, and counted, on its own.

CPU binders stand for the devices. Each knows the buffers that it made and takes no other's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.bundles import Bundles, open_engine
from support.engines import feed

from cachegraph.models.contract import CARRIED, DType
from cachegraph.runtime.binding import Array, Buffer, CpuBinder
from cachegraph.runtime.bundle import open_bundle
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.opening import OpenGraph, OpenGraphs, open_graphs
from cachegraph.runtime.ort import SessionOptions, load_onnxruntime
from cachegraph.runtime.stages import StageChain

pytestmark = pytest.mark.r2
SPLIT = (2, 2, 1)
NAMES = ("cuda:0", "cpu", "cuda:1")


class Device(CpuBinder):
    """A device that owns what it made."""

    def __init__(self, ort: Any) -> None:
        super().__init__(ort)
        self.made: list[Buffer] = []

    def own(self, *buffers: Buffer) -> None:
        for buffer in buffers:
            assert any(buffer is mine for mine in self.made), "a buffer of another device"

    def beside(self, buffer: Buffer) -> CpuBinder:
        self.own(buffer)
        return self

    def cache(self, initial: Array, dtype: DType) -> Buffer:
        self.made.append(super().cache(initial, dtype))
        return self.made[-1]

    def host(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        self.made.append(super().host(shape, dtype))
        return self.made[-1]

    def push(self, buffer: Buffer) -> None:
        self.own(buffer)

    def pull(self, buffer: Buffer) -> Array:
        self.own(buffer)
        return super().pull(buffer)

    def read_rows(self, buffer: Buffer, rows: Array) -> Array:
        self.own(buffer)
        return super().read_rows(buffer, rows)

    def write_rows(self, buffer: Buffer, rows: Array, values: Array) -> None:
        self.own(buffer)
        super().write_rows(buffer, rows, values)

    def copy_rows(self, buffer: Buffer, source: Array, target: Array) -> None:
        self.own(buffer)
        super().copy_rows(buffer, source, target)

    def move_rows(self, source: Buffer, rows: Array, target: Buffer, places: Array) -> None:
        self.own(source, target)
        super().move_rows(source, rows, target, places)

    def zero_rows(self, buffer: Buffer, start: int, end: int) -> None:
        self.own(buffer)
        super().zero_rows(buffer, start, end)


def spread(bundle: Path, *, draft: bool = False) -> Engine:
    """An engine whose stages are on three devices; the draft graph is on the last."""
    folder, manifest = open_bundle(bundle, draft=draft)
    ort = load_onnxruntime()
    options = SessionOptions(threads=1, spinning=False, optimization="basic")
    found = open_graphs(ort, folder, manifest, "cpu", options, draft=draft)
    binders = [Device(ort) for _ in NAMES]

    def moved(graph: OpenGraph, number: int) -> OpenGraph:
        return replace(graph, device=NAMES[number], binder=binders[number])

    stages = tuple(moved(stage, number) for number, stage in enumerate(found.stages))
    last = moved(found.draft, len(NAMES) - 1) if found.draft else None
    return Engine(folder, manifest, OpenGraphs(stages=stages, draft=last))


def made(bundles: Bundles, **choices: Any) -> Path:
    return bundles.bundle(bundles.checkpoint(with_draft=True), split=SPLIT, **choices)


@pytest.fixture
def both(bundles: Bundles) -> Any:
    """The same bundle on one device and on three."""
    with open_engine(made(bundles), "basic") as one, spread(made(bundles)) as three:
        yield one, three


def equal(one: Mapping[Any, Array], other: Mapping[Any, Array]) -> None:
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[key], other[key]) for key in one)


def test_steps_edits_and_saved_files_are_those_of_one_device(
    both: tuple[Engine, Engine], tmp_path: Path
) -> None:
    one, three = both
    for number, engine in enumerate(both):
        feed(engine, {0: 17, 1: 5})
        assert engine.copy(0, 2) > 0
        engine.remove(0, 14)
        engine.clear(1, data=True)
        engine.save(tmp_path / str(number))
    equal(load_file(tmp_path / "0"), load_file(tmp_path / "1"))
    equal(feed(one, {0: 3, 1: 6, 2: 2}), feed(three, {0: 3, 1: 6, 2: 2}))
    for engine in both:
        engine.restore(tmp_path / "0", {2: 3})
        engine.reset(0)
    equal(feed(one, {0: 2, 3: 9}), feed(three, {0: 2, 3: 9}))


@pytest.mark.parametrize("mode", ["ring", "delta", "shadow", "host"])
def test_a_checkpoint_copies_each_state_where_it_is(
    both: tuple[Engine, Engine], mode: str
) -> None:
    one, three = both
    answers = []
    for engine in both:
        feed(engine, {0: 13, 1: 6})
        engine.checkpoints.prepare(mode, 3)
        engine.checkpoints.save()
        feed(engine, {0: 2})
        engine.checkpoints.prepare(mode, 5)
        feed(engine, {0: 3, 1: 2})
        answers.append([engine.checkpoints.accept(seq, 1) for seq in (0, 1)])
    assert answers[0] == answers[1]
    equal(feed(one, {0: 4, 1: 4}), feed(three, {0: 4, 1: 4}))


@pytest.mark.parametrize("mode", ["ring", "delta", "shadow", "host"])
def test_memory_is_counted_on_the_device_that_holds_it(bundles: Bundles, mode: str) -> None:
    with spread(made(bundles), draft=True) as engine:
        held = Counter[str]()
        graph = engine._graph
        assert isinstance(graph, StageChain)
        engine.checkpoints.prepare(mode, 4)
        for name, binder in zip(NAMES, graph._binders, strict=True):
            assert isinstance(binder, Device)
            held[name] = sum(buffer.array.nbytes for buffer in binder.made)
        host = {"host": engine.memory.copies.get("host", 0)}
        carried = engine.memory.copies[CARRIED]
        held["cpu"] += host["host"] + carried
        found = engine.memory.breakdown()
        assert {name: sum(sizes.values()) for name, sizes in found.items()} == dict(held)
        assert engine.memory.total == sum(held.values())
        assert found["cpu"][CARRIED] == carried
        states = {name for name, sizes in found.items() if {"base", "shadow"} & sizes.keys()}
        assert states == (set(NAMES) if mode in ("delta", "shadow") else set())


def test_drafts_start_from_the_last_stage(bundles: Bundles) -> None:
    whole = bundles.bundle(bundles.checkpoint(with_draft=True))
    with (
        Engine.load(whole, device="cpu", threads=1, optimization="basic", draft=True) as one,
        spread(made(bundles), draft=True) as three,
    ):
        drafts = []
        for engine in (one, three):
            feed(engine, {0: 19, 1: 6})
            engine.copy(0, 2)
            engine.remove(0, 17)
            drafts.append(
                engine.draft({0: 5, 1: 9, 2: 3}, 3, lambda _, row: int(row.argmax()))
            )
        assert drafts[0] == drafts[1]
        assert all(len(ids) == 3 for ids in drafts[0].values())
