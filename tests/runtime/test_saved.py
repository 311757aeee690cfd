"""Saved sequences: restored anywhere they fit, they go on as if they had never stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.bundles import Bundles, open_engine, with_capacity
from support.engines import Engines, changed_rows, same_bits, snapshot, text
from support.sessions import Oracle, append, needed_rows

from cachegraph.models.errors import CapacityError, StateFileError, UsageError
from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2

# Blocks of 4 and 12, a window of 7: around every multiple near the window and one block behind it.
EDGES = sorted(
    {0, 1, 3, 7, 99, 100}
    | {m + d for m in (4, 8, 12, 16, 24, 36) for d in (-1, 0, 1, 2)}
    | {7 + r + d for r in (4, 12) for d in (-1, 0, 1, 2)}
)
# Other context, slots, longest step and rewind budget; all that may differ from CAPACITY.
OTHERS = (
    {"context": 160, "sequences": 2, "max_step": 9, "rewind": 2},
    {"context": 101, "sequences": 5, "max_step": 40, "rewind": 13},
    {"context": 100, "sequences": 3, "max_step": 1, "rewind": 0},
)


@pytest.fixture(scope="module")
def oracle(bundles: Bundles) -> Iterator[Oracle]:
    """Cold runs of the mixed model, with more context than any other engine."""
    made = Oracle(bundles.bundle(bundles.checkpoint(), capacity=with_capacity(context=160)))
    yield made
    made.engine.close()


def words(engine: Engine, seq: int, first: int, end: int) -> list[int]:
    return text(seq, first, end - first, engine.manifest.vocab_size)


def hold(engine: Engine, seq: int, length: int) -> None:
    """Make a sequence hold the first tokens of its text."""
    engine.clear(seq)
    if length:
        append(engine, seq, words(engine, seq, 0, length))


def goes_on(engine: Engine, slot: int, oracle: Oracle) -> None:
    """The next 14 tokens (past a block of 12), as many as there is room for, equal a cold run."""
    length, room = engine.length(slot), engine.manifest.capacity.context
    end = min(length + 14, room)
    oracle.check(engine, slot, words(engine, 0, length, end))


@pytest.mark.parametrize("length", EDGES)
def test_any_length_goes_on_in_its_own_and_in_a_dirty_slot(
    engine: Engine, oracle: Oracle, tmp_path: Path, length: int
) -> None:
    """A02, A05: empty, below one block, at and around every edge."""
    hold(engine, 0, length)
    reach = engine.reachable(0)
    size = engine.save(tmp_path / "state", [0])
    assert size == (tmp_path / "state").stat().st_size
    hold(engine, 0, 33)
    hold(engine, 2, 47)
    assert engine.restore(tmp_path / "state", {0: 2}) == {0: 2}
    assert engine.restore(tmp_path / "state") == {0: 0}
    for slot in (2, 0):
        assert engine.tokens(slot) == tuple(words(engine, 0, 0, length))
        assert engine.reachable(slot) == reach
        goes_on(engine, slot, oracle)


@pytest.mark.parametrize("sizes", OTHERS, ids=str)
def test_an_engine_of_other_sizes_takes_it(
    engine: Engine, engines: Engines, oracle: Oracle, tmp_path: Path, sizes: dict[str, int]
) -> None:
    """A09: identity is weights, config and cache layout, never capacity or slots."""
    other = engines.get(capacity=with_capacity(**sizes))
    slot = sizes["sequences"] - 1
    for length in EDGES[:: 4 if sizes["max_step"] == 1 else 2]:
        hold(engine, 0, length)
        engine.save(tmp_path / "there", [0])
        hold(other, slot, 50)
        other.restore(tmp_path / "there", {0: slot})
        other.save(tmp_path / "back", [slot])
        goes_on(other, slot, oracle)
        engine.restore(tmp_path / "back", {slot: 3})
        goes_on(engine, 3, oracle)


@pytest.mark.parametrize("name", ["hca_only", "csa_only", "window_only", "ratios"])
def test_every_kind_of_model_is_restored(engines: Engines, tmp_path: Path, name: str) -> None:
    engine = engines.get(name)
    cold = Oracle(engine.folder)
    for length in (1, 6, 20, 41):
        hold(engine, 0, length)
        engine.save(tmp_path / "state", [0])
        hold(engine, 1, 30)
        engine.restore(tmp_path / "state", {0: 1})
        goes_on(engine, 1, cold)
    cold.engine.close()


def test_what_was_rejected_before_a_save_stays_out_of_reach(
    engine: Engine, oracle: Oracle, tmp_path: Path
) -> None:
    hold(engine, 0, 50)
    engine.remove(0, 41)
    reach = engine.reachable(0)
    engine.save(tmp_path / "state")
    engine.restore(tmp_path / "state", {0: 3})
    assert engine.reachable(3) == reach
    engine.remove(3, reach[1].start)
    goes_on(engine, 3, oracle)


def test_one_file_holds_several_sequences(
    engine: Engine, oracle: Oracle, tmp_path: Path
) -> None:
    """Restored all, some, or with their slots exchanged."""
    lengths = {0: 26, 1: 0, 2: 5, 3: 61}
    for seq, length in lengths.items():
        hold(engine, seq, length)
    held = {seq: engine.tokens(seq) for seq in lengths}
    rows = {seq: needed_rows(engine, seq) for seq in lengths}
    path = tmp_path / "state"
    engine.save(path)
    engine.clear()
    assert engine.restore(path) == {0: 0, 2: 2, 3: 3}
    assert {seq: engine.tokens(seq) for seq in lengths} == held
    assert all(same_bits(rows[seq], needed_rows(engine, seq)) for seq in lengths)
    engine.restore(path, {0: 3, 3: 0})
    assert [engine.tokens(s) for s in (0, 3)] == [held[3], held[0]]
    goes_on(engine, 3, oracle)
    engine.clear()
    assert engine.restore(path, {3: 1}) == {3: 1}
    assert [engine.length(seq) for seq in range(4)] == [0, 61, 0, 0]


def test_an_empty_sequence_empties_its_slot(engine: Engine, tmp_path: Path) -> None:
    """Empty and absent differ: the one is restored, the other is refused."""
    engine.save(tmp_path / "none")
    engine.save(tmp_path / "empty", [1])
    hold(engine, 1, 20)
    assert engine.restore(tmp_path / "none") == {}
    assert engine.length(1) == 20
    assert engine.restore(tmp_path / "empty") == {1: 1}
    assert engine.length(1) == 0
    with pytest.raises(StateFileError, match=r"holds sequences \[1\], not 0"):
        engine.restore(tmp_path / "empty", {0: 0})


def test_a_restore_writes_rows_of_its_slot_only(engine: Engine, tmp_path: Path) -> None:
    for seq in range(4):
        hold(engine, seq, 40 + seq)
    engine.save(tmp_path / "state", [0])
    before = snapshot(engine)
    engine.restore(tmp_path / "state", {0: 2})
    after = snapshot(engine)
    for spec in engine.manifest.contract.caches:
        base = spec.layout.base(2)
        own = set(range(base, base + spec.layout.rows_per_stream))
        assert changed_rows(spec, before, after) <= own
    assert [engine.length(seq) for seq in range(4)] == [40, 41, 40, 43]


def test_saving_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    hold(engine, 0, 30)
    before = snapshot(engine)
    engine.save(tmp_path / "state")
    assert same_bits(before, snapshot(engine))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_wrong_slots_are_refused(engine: Engine, tmp_path: Path) -> None:
    hold(engine, 0, 9)
    hold(engine, 1, 5)
    path = tmp_path / "state"
    engine.save(path)
    before = snapshot(engine)
    faults = (
        ({0: 4}, UsageError, "no sequence 4"),
        ({0: -1}, UsageError, "no sequence -1"),
        ({0: 2, 1: 2}, UsageError, "two saved sequences want one slot"),
        ({3: 0}, StateFileError, r"holds sequences \[0, 1\], not 3; choose one of them"),
        ({0: 2, 7: 3}, StateFileError, "not 7"),
    )
    for targets, fault, pattern in faults:
        with pytest.raises(fault, match=pattern):
            engine.restore(path, targets)
    with pytest.raises(UsageError, match="no sequence 4"):
        engine.save(tmp_path / "other", [0, 4])
    assert not (tmp_path / "other").exists()
    assert same_bits(before, snapshot(engine))
    assert [engine.length(seq) for seq in range(4)] == [9, 5, 0, 0]


def test_a_sequence_longer_than_the_context_is_refused(
    engine: Engine, engines: Engines, tmp_path: Path
) -> None:
    small = engines.get(capacity=with_capacity(context=30))
    hold(small, 1, 12)
    hold(engine, 0, 31)
    hold(engine, 1, 8)
    engine.save(tmp_path / "state")
    before = snapshot(small)
    with pytest.raises(CapacityError, match="sequence 0 has 31 tokens, the context holds 30"):
        small.restore(tmp_path / "state", {1: 0, 0: 1})
    assert same_bits(before, snapshot(small))
    assert [small.length(0), small.length(1)] == [0, 12]
    small.restore(tmp_path / "state", {1: 0})
    assert small.length(0) == 8


AGAIN = """
import json, sys
import numpy as np
from cachegraph.runtime.engine import Engine
bundle, state, out, tokens = sys.argv[1:]
with Engine.load(bundle, device="cpu", threads=1, spinning=False) as engine:
    engine.restore(state)
    done = engine.prefill(json.loads(tokens), 1)
    np.save(out, done.logits)
    print(json.dumps([done.reused, done.planned]))
"""


@pytest.mark.parametrize("length", [1, 16, 23])
def test_a_new_process_restores_and_the_next_request_reuses_it(
    engine: Engine, oracle: Oracle, tmp_path: Path, length: int
) -> None:
    """A07: the prefix and 2 tokens; 2 are planned, and the logits are those of a cold run."""
    hold(engine, 1, length)
    engine.save(tmp_path / "state")
    tokens = words(engine, 1, 0, length + 2)
    args = [engine.folder, tmp_path / "state", tmp_path / "out.npy", json.dumps(tokens)]
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [length, 2]
    wanted, _ = oracle.run(tokens)
    assert np.abs(np.load(tmp_path / "out.npy") - wanted[-1]).max() <= 1e-5


def test_a_bundle_that_was_moved_takes_its_states(
    engine: Engine, oracle: Oracle, tmp_path: Path
) -> None:
    """A path is no part of the identity."""
    hold(engine, 0, 18)
    engine.save(tmp_path / "state")
    moved = tmp_path / "moved"
    moved.symlink_to(engine.folder)
    with open_engine(moved) as other:
        other.restore(tmp_path / "state")
        goes_on(other, 0, oracle)
