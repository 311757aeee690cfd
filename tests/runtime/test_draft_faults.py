"""Faults beside drafting: no sequence is changed, and no draft made of rows that never were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import CAPACITY, Bundles, with_capacity
from support.draft_judge import CONFIG, Judge, Logits, bundle_of, check, drafted, load

from cachegraph.models.contract import STREAMS
from cachegraph.models.errors import BatchError, ConfigError, StateFileError
from cachegraph.runtime.binding import BoundCall
from cachegraph.runtime.drafter import Drafter
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.saved import SavedDraft

pytestmark = pytest.mark.r2


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.fixture(scope="module")
def text(judge: Judge) -> list[int]:
    return judge.text(40)


@pytest.fixture(scope="module")
def opened(bundles: Bundles) -> Iterator[Engine]:
    with load(bundle_of(bundles)) as engine:
        yield engine


@pytest.fixture
def engine(opened: Engine) -> Engine:
    opened.clear()
    return opened


def drafter_of(engine: Engine) -> Drafter:
    drafter = engine._store.drafter
    assert drafter is not None
    return drafter


@pytest.mark.parametrize("length", [1, 3, 9])
def test_pairs_that_wait_leave_no_rows_in_a_file(
    engine: Engine, judge: Judge, text: list[int], tmp_path: Path, length: int
) -> None:
    engine.append(text[20:30], 1)  # what the slot held before
    drafted(engine, {1: text[30]})
    engine.append(text[:length])
    saved, _ = drafter_of(engine).stored(0)
    assert (saved.raw_first, saved.paired, saved.end) == (1, 1, length)
    engine.save(tmp_path / "state", [0])
    engine.restore(tmp_path / "state", {0: 1})
    check(engine, judge, text[length], 1)
    engine.append(text[length:15], 1)
    check(engine, judge, text[15], 1)


def test_drafts_that_start_anew_leave_no_rows_of_before_in_a_file(
    engine: Engine, bundles: Bundles, judge: Judge, text: list[int], tmp_path: Path
) -> None:
    with load(bundle_of(bundles), draft=False) as plain:
        plain.append(text[:20])
        plain.save(tmp_path / "plain")
    engine.restore(tmp_path / "plain")
    engine.append(text[20:22])
    engine.save(tmp_path / "state")
    engine.restore(tmp_path / "state", {0: 2})
    check(engine, judge, text[22], 2, known_from=20)


def test_streams_that_cannot_be_read_cost_the_warm_start_alone(
    engine: Engine,
    judge: Judge,
    text: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.append(text[:10])
    engine.append(text[:12], 1)
    read = engine._graph.result

    def broken(call: BoundCall, name: str) -> Logits:
        if name == STREAMS:
            raise RuntimeError("no device")
        return read(call, name)

    monkeypatch.setattr(engine._graph, "result", broken)
    engine.append(text[10:14])
    monkeypatch.undo()
    assert engine.tokens(0) == tuple(text[:14])
    assert "drafts of sequences [0] start anew: no device" in caplog.text
    check(engine, judge, text[12], 1)  # the neighbour's streams are known
    assert drafted(engine, {0: text[14]})[0] == {0: []}
    engine.append(text[14:16])
    check(engine, judge, text[16], known_from=14)


def break_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """No draft row can be moved that way any more; the main graph's can."""

    def fail(buffer: object, places: object, values: object) -> None:
        raise RuntimeError("no device")

    drafter = drafter_of(engine)
    broken = copy(drafter._binder)
    monkeypatch.setattr(broken, method, fail)
    monkeypatch.setattr(drafter, "_binder", broken)


@pytest.mark.parametrize("edit", ["copy", "restore"])
def test_rows_that_do_not_move_start_drafts_anew(
    engine: Engine,
    judge: Judge,
    text: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    edit: str,
) -> None:
    engine.append(text[10:30], 2)  # what the target held before
    drafted(engine, {2: text[30]})
    engine.append(text[:20])
    drafted(engine, {0: text[20]})
    engine.save(tmp_path / "state", [0])
    edits: dict[str, tuple[str, Callable[[], object]]] = {
        "copy": ("copy_rows", lambda: engine.copy(0, 2)),
        "restore": ("write_rows", lambda: engine.restore(tmp_path / "state", {0: 2})),
    }
    method, move = edits[edit]
    break_rows(engine, monkeypatch, method)
    with pytest.raises(RuntimeError, match="no device"):
        move()
    monkeypatch.undo()
    assert engine.tokens(2) == tuple(text[:20])
    assert drafted(engine, {2: text[20]})[0] == {2: []}
    engine.append(text[20:22], 2)
    check(engine, judge, text[22], 2, known_from=20)
    check(engine, judge, text[20])


def test_a_copy_keeps_nothing_of_what_its_target_held(
    engine: Engine, bundles: Bundles, judge: Judge, text: list[int], tmp_path: Path
) -> None:
    """Rows of later positions that the target held would be saved as the copy's."""
    with load(bundle_of(bundles), draft=False) as plain:
        plain.append(text[:20])
        plain.save(tmp_path / "plain")
    engine.restore(tmp_path / "plain", {0: 2})
    engine.append(text[20:30], 2)
    drafted(engine, {2: text[30]})  # rows of positions 21 to 30
    engine.append(text[:10])
    drafted(engine, {0: text[10]})
    engine.copy(0, 2)
    saved, _ = drafter_of(engine).stored(2)
    assert (saved.raw_first, saved.paired) == (1, 10)
    engine.save(tmp_path / "state", [2])
    engine.restore(tmp_path / "state", {2: 1})
    check(engine, judge, text[10], 1)
    check(engine, judge, text[10], 2)


@pytest.mark.parametrize("max_step", [1, 2, 5])
def test_steps_shorter_than_the_rewind_budget_keep_rows_for_it(
    bundles: Bundles, judge: Judge, text: list[int], max_step: int
) -> None:
    """As many drafts as the budget, then as many tokens back: the window is still whole."""
    capacity = with_capacity(max_step=max_step)
    with load(bundle_of(bundles, capacity=capacity)) as engine:
        for end in range(24, 33):
            engine.append(text[engine.length(0) : end])
            check(engine, judge, text[end], count=capacity.rewind)
            engine.remove(0, end - capacity.rewind)
            check(engine, judge, text[end - capacity.rewind])


VOCAB, REWIND = CONFIG.vocab_size, CAPACITY.rewind


@pytest.mark.parametrize(
    ("count", "said"),
    [({}, "none"), ({1: 2}, "none"), (None, "none"), (2.0, "float"), ({0: True}, "bool")],
    ids=str,
)
def test_counts_that_are_none_are_refused(
    engine: Engine, text: list[int], count: Any, said: str
) -> None:
    engine.append(text[:12])
    with pytest.raises(ConfigError) as refused:
        drafted(engine, {0: 5}, count)
    assert str(refused.value) == (
        f"sequence 0: the number of drafts must be an integer from 1 to {REWIND}, got {said}"
    )


BAD_IDS = {
    "float": (3.0, f"ids must be integers from 0 to {VOCAB - 1}, got float"),
    "bool": (True, f"ids must be integers from 0 to {VOCAB - 1}, got bool"),
    "none": (None, f"ids must be integers from 0 to {VOCAB - 1}, got NoneType"),
    "a row": (np.zeros(VOCAB), f"ids must be integers from 0 to {VOCAB - 1}, got ndarray"),
    "negative": (-1, "id -1 is not in the vocabulary, which has ids 0 to"),
    "too large": (np.int64(VOCAB), f"id {VOCAB} is not in the vocabulary, which has ids 0 to"),
}


@pytest.mark.parametrize(("token", "message"), BAD_IDS.values(), ids=BAD_IDS)
def test_ids_that_are_none_are_refused(
    engine: Engine, judge: Judge, text: list[int], token: Any, message: str
) -> None:
    """Pending ones, and those that `choose` returns: the first of all, or one in the middle."""
    engine.append(text[:12])
    said = f"^sequence 0: {message}[^\\n]*$"
    with pytest.raises(BatchError, match=said):
        engine.draft({0: token}, 3, lambda seq, row: 0)
    for chosen in ([token], [0, token]):
        choices = iter(chosen)
        with pytest.raises(BatchError, match=said):
            engine.draft({0: 5}, 3, lambda seq, row, left=choices: next(left))  # type: ignore
    check(engine, judge, text[12])


def test_ids_and_counts_of_numpy_are_taken(
    engine: Engine, judge: Judge, text: list[int]
) -> None:
    engine.append(text[:12])
    wanted, _ = judge.drafts(text[:12], text[12], 3)
    pending: Any = {0: np.int32(text[12])}
    found = engine.draft(pending, np.int64(3), lambda seq, row: row.argmax())  # type: ignore
    assert found == {0: wanted.tolist()}
    assert {type(token) for token in found[0]} == {int}


def test_logits_that_were_chosen_from_stay_as_they_are(
    engine: Engine, text: list[int]
) -> None:
    engine.append(text[:12])
    rows: list[Logits] = []
    copies: list[Logits] = []

    def choose(seq: int, row: Logits) -> int:
        rows.append(row)
        copies.append(row.copy())
        return int(row.argmax())

    engine.draft({0: text[12]}, 3, choose)
    engine.append(text[12:14])
    drafted(engine, {0: text[14]})
    assert np.array_equal(rows, copies)


def test_a_file_with_a_draft_row_of_the_first_token_is_refused(
    engine: Engine,
    bundles: Bundles,
    judge: Judge,
    text: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first token has no pair, so that such a row is junk."""
    engine.append(text[:6])
    drafted(engine, {0: text[6]})
    stored = drafter_of(engine).stored

    def with_first(seq: int) -> tuple[SavedDraft, dict[str, Any]]:
        part, rows = stored(seq)
        name, values = next((n, v) for n, v in rows.items() if n != "0.carried")
        assert (part.raw_first, part.paired) == (1, 6)
        rows[name] = np.concatenate((values[:1], values))
        return part.model_copy(update={"raw_first": 0}), rows

    monkeypatch.setattr(drafter_of(engine), "stored", with_first)
    engine.save(tmp_path / "state")
    monkeypatch.undo()
    engine.append(text[6:9])
    with pytest.raises(StateFileError, match=r"draft row of its first token[^\n]*$"):
        engine.restore(tmp_path / "state")
    assert engine.tokens(0) == tuple(text[:9])
    check(engine, judge, text[9])
    with load(bundle_of(bundles), draft=False) as plain:
        plain.restore(tmp_path / "state")
        plain.save(tmp_path / "again")
    engine.restore(tmp_path / "again")
    assert engine.tokens(0) == tuple(text[:6])


def test_an_empty_sequence_is_saved_and_restored(
    engine: Engine, judge: Judge, text: list[int], tmp_path: Path
) -> None:
    engine.save(tmp_path / "state", [0])
    engine.append(text[10:14])
    engine.restore(tmp_path / "state")
    assert engine.tokens(0) == ()
    engine.append(text[:5])
    check(engine, judge, text[5])
