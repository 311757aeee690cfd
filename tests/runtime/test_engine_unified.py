"""A unified raw cache: copies share raw rows, and every answer is that of a per-stream cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.bundles import with_capacity
from support.engines import Engines, changed_rows, cold, feed, same_bits, snapshot
from support.sessions import needed_rows

from cachegraph.models.contract import CacheKind, RowSharing
from cachegraph.models.errors import UsageError
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.unified_cells import UnifiedCells

pytestmark = pytest.mark.r2

CAPACITY = with_capacity(max_step=12, rewind=5)
MODELS = ("mixed", "hca_only", "csa_only", "window_only", "ratios")


def opened(
    engines: Engines, name: str = "mixed", raw: RowSharing = RowSharing.UNIFIED
) -> Engine:
    return engines.get(name, capacity=CAPACITY, raw=raw)


@pytest.fixture
def engine(engines: Engines) -> Engine:
    made = opened(engines)
    made.checkpoints.release()
    return made


def pool(engine: Engine) -> UnifiedCells:
    cells = engine._store.table.cells
    assert isinstance(cells, UnifiedCells)
    return cells


def raw_bits(engine: Engine) -> dict[str, bytes]:
    caches = engine.manifest.contract.caches
    raw = (spec.name for spec in caches if spec.kind is CacheKind.RAW)
    return {name: engine._store.caches[name].array.tobytes() for name in raw}


def test_the_manifest_says_so_and_the_graph_is_the_same(engines: Engines) -> None:
    """Which row belongs to whom is the host's business: what was proved of one graph holds."""
    ours, other = opened(engines), opened(engines, raw=RowSharing.PER_STREAM)
    assert ours.manifest.layouts[CacheKind.RAW].sharing is RowSharing.UNIFIED
    shared = [k for k, v in ours.manifest.layouts.items() if v.sharing is RowSharing.UNIFIED]
    assert shared == [CacheKind.RAW]
    name = ours.manifest.template
    assert (ours.folder / name).read_bytes() == (other.folder / name).read_bytes()
    assert ours.memory == other.memory


@pytest.mark.parametrize("name", MODELS)
def test_batches_give_the_logits_of_a_per_stream_cache(engines: Engines, name: str) -> None:
    ours, other = opened(engines, name), opened(engines, name, RowSharing.PER_STREAM)
    steps = ({0: 30, 3: 2}, {1: 11}, {0: 1, 1: 1, 3: 1}, {0: 2, 1: 5, 2: 24}, {2: 1}, {3: 3})
    for counts in steps:
        found, wanted = feed(ours, counts), feed(other, counts)
        for seq in counts:
            assert np.abs(found[seq] - wanted[seq]).max() <= 1e-5


@pytest.mark.parametrize("length", [1, 7, 12, 23, 60])
def test_a_copy_moves_no_raw_byte(engine: Engine, length: int) -> None:
    feed(engine, {2: 50})
    feed(engine, {0: length})
    before = raw_bits(engine)
    moved = engine.copy(0, 2)
    assert raw_bits(engine) == before
    rows = engine._store.table.stored(0).rows
    caches = engine.manifest.contract.caches
    assert moved == sum(
        rows[spec.kind].size * spec.width * 4
        for spec in caches
        if spec.kind is not CacheKind.RAW
    )
    assert same_bits(needed_rows(engine, 0), needed_rows(engine, 2))
    assert engine.reachable(0) == engine.reachable(2)


@pytest.mark.parametrize("together", [True, False])
def test_copies_go_their_own_ways(engine: Engine, together: bool) -> None:
    """All four sequences share one text, then take other tokens, at once or one after another."""
    wanted = []
    for seq in range(4):
        engine.clear()
        feed(engine, {0: 33}, texts={0: 7})
        wanted.append(feed(engine, {0: 40}, texts={0: seq})[0])
    engine.clear()
    feed(engine, dict.fromkeys(range(4), 60))
    engine.clear(0)
    feed(engine, {0: 33}, texts={0: 7})
    for target in (1, 2, 3):
        engine.copy(0, target)
    assert (pool(engine)._users[:-1] == 4).sum() == pool(engine).layout.rows_per_stream
    found: dict[int, list[np.ndarray]] = {seq: [] for seq in range(4)}
    for count in (1, 12, 3, 24):
        groups = [range(4)] if together else [[seq] for seq in range(4)]
        for group in groups:
            for seq, rows in feed(engine, dict.fromkeys(group, count)).items():
                found[seq].append(rows)
    for seq in range(4):
        assert np.abs(np.concatenate(found[seq]) - wanted[seq]).max() <= 1e-5
    assert pool(engine)._users[:-1].max() == 1


def test_a_rejection_on_one_side_of_a_copy_leaves_the_other(engine: Engine) -> None:
    wanted = cold(engine, 0, [50])[30:]
    engine.clear()
    feed(engine, {0: 30})
    engine.copy(0, 1)
    engine.remove(1, 26)
    feed(engine, {1: 9}, texts={1: 5})
    assert np.abs(feed(engine, {0: 20})[0] - wanted).max() <= 1e-5


def test_clearing_one_of_two_zeroes_only_what_it_owned_alone(engine: Engine) -> None:
    feed(engine, {0: 30})
    engine.copy(0, 1)
    feed(engine, {1: 4}, texts={1: 5})
    own, held = pool(engine).own_rows(1), needed_rows(engine, 0)
    assert own.size == 4
    before = snapshot(engine)
    engine.clear(1, data=True)
    after = snapshot(engine)
    for spec in engine.manifest.contract.caches:
        if spec.kind is CacheKind.RAW:
            assert changed_rows(spec, before, after) == set(own.tolist())
            assert not after[spec.name][own].any()
    assert same_bits(held, needed_rows(engine, 0))


def test_a_reset_leaves_every_raw_byte_and_frees_the_cells(engine: Engine) -> None:
    feed(engine, {0: 30, 1: 20})
    engine.copy(0, 2)
    raw, held = raw_bits(engine), needed_rows(engine, 2)
    engine.reset(0)
    assert raw_bits(engine) == raw
    assert same_bits(held, needed_rows(engine, 2))
    engine.reset(2)
    engine.keep(3)
    assert not pool(engine)._users[:-1].any()
    with pytest.raises(UsageError, match="no sequence 4"):
        engine.reset(4)


@pytest.mark.parametrize("mode", ["ring", "delta", "shadow", "host"])
def test_checkpoints_go_back_and_forth_while_others_write(engine: Engine, mode: str) -> None:
    """Cells of rejected tokens are nobody else's until they are written again."""
    wanted = cold(engine, 1, [44])
    engine.clear()
    feed(engine, {1: 30})
    engine.copy(1, 2)
    engine.checkpoints.prepare(mode, 5)
    engine.checkpoints.save()
    feed(engine, {1: 5})
    for count in (1, 4, 0, 5, 3):
        if engine.checkpoints.accept(1, count).replay_from is not None:
            feed(engine, {1: count} if count else {0: 1})
        feed(engine, {0: 9, 3: 12})
        feed(engine, {2: 1}, texts={2: 8})
        if mode in ("shadow", "host"):
            break  # each replay is a new text for the record
    held = engine.length(1)
    assert np.abs(feed(engine, {1: 9})[1] - wanted[held : held + 9]).max() <= 1e-5
    engine.checkpoints.release()


def test_state_files_pass_between_both_kinds(engines: Engines, tmp_path: Path) -> None:
    ours, other = opened(engines), opened(engines, raw=RowSharing.PER_STREAM)
    wanted = cold(other, 0, [60])[40:]
    for source, target in ((ours, other), (other, ours), (ours, ours)):
        source.clear()
        feed(source, {0: 40})
        source.copy(0, 3)
        source.save(tmp_path / "state")
        target.clear()
        feed(target, {1: 50, 2: 9})
        target.copy(1, 0)
        target.restore(tmp_path / "state", {0: 1, 3: 2})
        assert target.tokens(1) == target.tokens(2)
        found = feed(target, {1: 20, 2: 20}, texts={1: 0, 2: 0})
        for seq in (1, 2):
            assert np.abs(found[seq] - wanted).max() <= 1e-5


def test_a_failed_restore_leaves_the_slot_empty_and_frees_its_cells(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(engine, {0: 30, 1: 12})
    engine.save(tmp_path / "state", [0])

    def broken(*_: object) -> None:
        raise OSError("the device is gone")

    monkeypatch.setattr(engine._store.binder, "write_rows", broken)
    with pytest.raises(OSError, match="gone"):
        engine.restore(tmp_path / "state", {0: 3})
    assert [engine.length(seq) for seq in range(4)] == [30, 12, 0, 0]
    assert (pool(engine)._slots[3] == -1).all()
    assert pool(engine)._users[:-1].sum() == pool(engine).layout.rows_per_stream + 12
