"""DESIGN section 6 on a running engine: one test for each rule of rows and padding."""

from __future__ import annotations

import numpy as np
import pytest
from support.bundles import Bundles, largest_difference, live_rows, twin_rows
from support.engines import (
    Call,
    Engines,
    changed_rows,
    cold,
    feed,
    poison_spare,
    same_bits,
    snapshot,
    text,
    watched,
    with_ladder,
)
from support.tiny import random_tensors, tiny_config

from cachegraph.models.deepseek_v4.twin import forward
from cachegraph.models.errors import BatchError, PlanError
from cachegraph.models.plan_fields import NO_PREVIOUS
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.memory import initial_caches
from cachegraph.runtime.planners import step as planning

pytestmark = pytest.mark.r2

# Steps of 1, 2, 3 and 4 sequences, so that lanes, streams and blocks are padded.
STEPS = ({0: 5}, {1: 9, 3: 2}, {0: 1, 1: 1, 3: 1}, {2: 30}, {0: 13, 1: 3, 2: 1, 3: 1}, {3: 7})


def test_rule_1_a_step_changes_rows_of_its_streams_and_spare_rows_only(engine: Engine) -> None:
    for counts in STEPS:
        before = snapshot(engine)
        feed(engine, counts)
        after = snapshot(engine)
        for spec in engine.manifest.contract.caches:
            layout = spec.layout
            own = {
                layout.base(seq) + i for seq in counts for i in range(layout.rows_per_stream)
            }
            allowed = own | set(range(layout.spare_start, layout.rows))
            assert changed_rows(spec, before, after) <= allowed, spec.name


def test_rule_2_scatter_targets_are_unique_and_spare_rows_are_never_read(
    engine: Engine,
) -> None:
    def check(call: Call) -> None:
        for spec in engine.manifest.contract.caches:
            rows = call.written(spec)
            assert len(set(rows.tolist())) == rows.size
            assert rows.min(initial=0) >= 0
            assert rows.max(initial=0) < spec.layout.rows

    with watched(engine, before=check, after=lambda call: poison_spare(engine, np.nan)):
        logits = [feed(engine, counts) for counts in STEPS]
    assert all(np.isfinite(rows).all() for step in logits for rows in step.values())


def test_rule_3_all_that_may_be_read_starts_finite(engine: Engine) -> None:
    contract = engine.manifest.contract
    initial = initial_caches(contract)
    for spec in contract.caches:
        cache = initial[spec.name]
        if NO_PREVIOUS in spec.layout.sentinels:
            row = cache[spec.layout.sentinel(NO_PREVIOUS)]
            half = spec.width // 2
            assert (row[:half] == 0).all()
            assert (row[half:] == -np.inf).all()
            row[:] = 0
        assert (cache == 0).all(), spec.name


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_rule_3_the_first_steps_of_a_fresh_engine_make_no_nan(
    bundles: Bundles, length: int
) -> None:
    """A42: no complete block, the first one, and one more token."""
    with Engines(bundles) as fresh:
        engine = fresh.get()
        logits = feed(engine, {1: length})[1]
        assert np.isfinite(logits).all()
        for name, rows in snapshot(engine).items():
            assert not np.isnan(rows).any(), name
        assert np.abs(logits - cold(engine, 2, [1] * length, source=1)).max() <= 1e-5


def test_rule_4_the_first_window_has_no_previous_block(
    engine: Engine,
) -> None:
    """The twin has no sentinel: it pools a first block from its own tokens alone."""
    tokens = text(0, 0, 13, engine.manifest.vocab_size)
    config = tiny_config()
    run = forward(config, random_tensors(config, seed=1), tokens)
    for chunks in ([13], [1] * 13, [3, 1, 9]):
        engine.clear()
        for count in chunks:
            feed(engine, {0: count})
        difference = largest_difference(live_rows(engine, 0), twin_rows(engine.manifest, run))
        assert difference <= 1e-4


def test_rules_4_and_5_padded_lanes_and_blocks_stay_finite(engines: Engines) -> None:
    """A padded stream sees no key at all, a padded block pools a sentinel alone."""
    for choices in ({}, {"select": "mask"}, {"dialect": "ort"}):
        engine = engines.get(**choices)
        poison_spare(engine, np.nan)
        padded = 0
        with watched(engine) as calls:
            for counts in STEPS:
                feed(engine, counts)
        for call in calls:
            padded += int(call.padded_lanes.sum())
            for spec in engine.manifest.contract.caches:
                rows = engine._store.caches[spec.name].array[call.written(spec)]
                assert np.isfinite(rows).all(), (spec.name, choices)
        assert padded > 0


def test_rule_7_every_bucket_that_fits_gives_the_same_numbers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {0: 3, 2: 3}
    cold(engine, 0, [9])
    cold(engine, 2, [6])
    wanted = feed(engine, counts)
    rows = {seq: live_rows(engine, seq) for seq in counts}
    manifest, seen = engine.manifest, set()
    for streams, step, context in manifest.ladder.sizes():
        if streams < len(counts) or step < 3:
            continue
        rungs = {"streams": (streams,), "contexts": (context,)}
        cold(engine, 0, [9])
        cold(engine, 2, [6])
        bucketed = with_ladder(manifest, steps=(step,), **rungs)
        monkeypatch.setattr(engine, "manifest", bucketed)
        monkeypatch.setattr(engine._steps, "_manifest", bucketed)
        with watched(engine) as calls:
            got = feed(engine, counts)
        monkeypatch.setattr(engine, "manifest", manifest)
        monkeypatch.setattr(engine._steps, "_manifest", manifest)
        seen.add((calls[0].dims["S"], calls[0].dims["P"], calls[0].dims["NC"]))
        assert largest_difference(got, wanted) <= 1e-5
        for seq in counts:
            assert largest_difference(live_rows(engine, seq), rows[seq]) <= 1e-5
    assert len(seen) >= 8


def test_rule_8_an_invalid_plan_is_refused_before_the_graph_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(engine, {0: 5})
    before = snapshot(engine)
    plan_raw = planning.plan_raw

    def beyond(*args: object, write_idxs: np.ndarray, **rest: object) -> object:
        write_idxs = np.full_like(write_idxs, 10**6)
        return plan_raw(*args, write_idxs=write_idxs, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "plan_raw", beyond)
    with (
        watched(engine) as calls,
        pytest.raises(PlanError, match=r"raw plan: write_idxs\[0\]"),
    ):
        feed(engine, {0: 1})
    assert calls == []
    monkeypatch.undo()
    assert engine.length(0) == 5
    assert same_bits(before, snapshot(engine))
    assert np.isfinite(feed(engine, {0: 1})[0]).all()


@pytest.mark.parametrize(
    ("positions", "fault"),
    [([6], "gap"), ([4], "repeat"), ([2], "step back"), ([5, 7], "gap")],
)
def test_rule_9_positions_are_the_batch_checkers_rule(
    engine: Engine, positions: list[int], fault: str
) -> None:
    feed(engine, {0: 5})
    with watched(engine) as calls, pytest.raises(BatchError, match=fault):
        engine.decode(Batch.of([3] * len(positions), positions))
    assert calls == []
    assert engine.length(0) == 5
