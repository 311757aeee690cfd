"""The drafter: whatever was done to a sequence, its drafts are those of the float64 twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file
from support.bundles import CAPACITY, Bundles, with_capacity
from support.draft_judge import (
    CONFIG,
    DRAFTS,
    NEAR,
    Judge,
    Logits,
    bundle_of,
    check,
    drafted,
    load,
)

from cachegraph.models.cache_types import CacheType
from cachegraph.models.contract import RowSharing
from cachegraph.models.errors import (
    BatchError,
    CachegraphError,
    CapacityError,
    ConfigError,
    StateFileError,
    StepError,
    UsageError,
)
from cachegraph.runtime import GenerateOptions
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.padding import fill_rows

pytestmark = pytest.mark.r2


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.fixture(scope="module")
def text(judge: Judge) -> list[int]:
    return judge.text(70)


@pytest.fixture(scope="module")
def opened(bundles: Bundles) -> Iterator[Engine]:
    with load(bundle_of(bundles)) as engine:
        yield engine


@pytest.fixture
def engine(opened: Engine) -> Engine:
    opened.clear()
    opened.checkpoints.release()
    return opened


def feed(engine: Engine, seq: int, tokens: Sequence[int], chunks: Sequence[int]) -> None:
    start = 0
    for size in chunks:
        engine.append(tokens[start : start + size], seq)
        start += size


CHUNKS = {
    "whole": [60],
    "single tokens": [1] * 60,
    "uneven": [7, 1, 1, 12, 3, 30, 1, 5],
    "as many as are kept": [9, 9, 8, 9, 10, 15],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_any_split_gives_the_twins_drafts(
    engine: Engine, judge: Judge, text: list[int], chunks: list[int]
) -> None:
    feed(engine, 0, text, chunks)
    check(engine, judge, text[60], count=CAPACITY.rewind)


def test_drafts_between_steps_change_nothing(
    engine: Engine, judge: Judge, text: list[int]
) -> None:
    for end in range(1, 60, 4):
        engine.append(text[engine.length(0) : end])
        check(engine, judge, text[end])


def test_neighbours_do_not_matter(engine: Engine, judge: Judge, text: list[int]) -> None:
    other = text[30:]
    for ends in ((3, 14), (16, 15), (17, 33)):
        starts = (engine.length(0), engine.length(2))
        parts = (text[starts[0] : ends[0]], other[starts[1] : ends[1]])
        owners = [0] * len(parts[0]) + [2] * len(parts[1])
        places = [*range(starts[0], ends[0]), *range(starts[1], ends[1])]
        engine.decode(Batch.of([*parts[0], *parts[1]], places, owners))
        found, _ = drafted(engine, {2: other[ends[1]], 0: text[ends[0]]})
        for seq, whole, end in ((0, text, ends[0]), (2, other, ends[1])):
            wanted, _ = judge.drafts(whole[:end], whole[end], DRAFTS)
            assert found[seq] == wanted.tolist()


@pytest.mark.parametrize("start", range(20, 24))
@pytest.mark.parametrize("kept", range(DRAFTS + 1))
def test_any_number_of_drafts_may_be_kept(
    engine: Engine, judge: Judge, text: list[int], start: int, kept: int
) -> None:
    """Verify, keep some, draft again, three times over: every phase of every window."""
    engine.append(text[:start])
    end = start
    for _ in range(3):
        check(engine, judge, text[end])
        drafts = [*text[end + 1 : end + 1 + kept], *[5] * (DRAFTS - kept)]
        places = range(end, end + 1 + DRAFTS)
        engine.decode(Batch.of([text[end], *drafts], places, logits=True))
        end += 1 + kept
        engine.remove(0, end)
    check(engine, judge, text[end])


@pytest.mark.parametrize("count", range(1, CAPACITY.rewind + 1))
def test_a_rewind_leaves_drafting_warm(
    engine: Engine, judge: Judge, text: list[int], count: int
) -> None:
    engine.append(text[:33])
    drafted(engine, {0: 5})
    engine.remove(0, 33 - count)
    check(engine, judge, text[33 - count])
    engine.append(text[33 - count : 40])
    check(engine, judge, text[40])


def test_a_rewind_past_the_streams_kept_starts_drafts_anew(
    engine: Engine, judge: Judge, text: list[int]
) -> None:
    """A block boundary farther back than the budget: no pair reaches over the one that lacks."""
    feed(engine, 0, text[:36], [1] * 36)
    back = engine.reachable(0)[-1].start
    assert 0 < back < 36 - CAPACITY.rewind - 1
    engine.remove(0, back)
    assert drafted(engine, {0: text[back]})[0] == {0: []}
    engine.append(text[back : back + 1])
    check(engine, judge, text[back + 1], known_from=back)


def test_tokens_taken_up_again_have_no_streams(
    engine: Engine, judge: Judge, text: list[int]
) -> None:
    """The drafter saw them go; a checkpoint brings them back without a step."""
    engine.append(text[:20])
    engine.checkpoints.save()
    engine.append(text[20:24])
    engine.checkpoints.accept(0, 1)
    check(engine, judge, text[21])
    engine.checkpoints.accept(0, 4)
    assert drafted(engine, {0: text[24]})[0] == {0: []}
    engine.append(text[24:25])
    check(engine, judge, text[25], known_from=24)


def test_every_lane_of_the_carried_rows_is_written() -> None:
    buffer = np.full((2 * 4, 3), np.nan, np.float32)
    rows = np.arange(9, dtype=np.float32).reshape(3, 3)
    fill_rows(buffer, rows, 3, 4)
    assert np.array_equal(buffer[:3], rows)
    assert not buffer[3:].any()


def test_drafting_again_or_going_on_otherwise_is_no_matter(
    engine: Engine, judge: Judge, text: list[int]
) -> None:
    engine.append(text[:25])
    drafted(engine, {0: 7})
    check(engine, judge, text[25])
    drafted(engine, {0: 9})
    engine.append(text[25:26])  # not what was drafted behind
    check(engine, judge, text[26])


def test_prefix_reuse_keeps_the_pairs_of_the_prefix(
    engine: Engine, judge: Judge, text: list[int]
) -> None:
    engine.prefill([*text[:30], 1, 2, 3])
    found = engine.prefill(text[:36])
    assert found.reused == 30
    check(engine, judge, text[36])
    assert engine.prefill([4, *text[1:20]]).reused == 0
    check(engine, judge, text[20])


@pytest.mark.parametrize("mode", ["ring", "delta", "shadow", "host"])
@pytest.mark.parametrize("kept", [0, 2, 4])
def test_checkpoints_of_every_mode(
    engine: Engine, judge: Judge, text: list[int], mode: str, kept: int
) -> None:
    engine.append(text[:31])
    engine.checkpoints.prepare(mode, 4)
    engine.checkpoints.save()
    engine.append(text[31:35])
    for count in (1, kept):  # back, and forward again to tokens that were rejected
        engine.checkpoints.accept(0, count)
    length = engine.length(0)
    engine.append(text[length:37])
    check(engine, judge, text[37])


def test_a_copy_drafts_like_its_source(engine: Engine, judge: Judge, text: list[int]) -> None:
    engine.append(text[40:60], 2)  # what the target held before
    engine.append(text[:21])
    drafted(engine, {0: 3})
    engine.copy(0, 2)
    check(engine, judge, text[21], 2)
    engine.append(text[21:40], 2)
    check(engine, judge, text[40], 2)
    check(engine, judge, text[21], 0)


@pytest.mark.parametrize("edit", ["clear", "reset", "keep"])
def test_a_forgotten_sequence_starts_anew(
    engine: Engine, judge: Judge, text: list[int], edit: str
) -> None:
    engine.append(text[30:55])
    engine.append(text[:9], 1)
    {"clear": engine.clear, "reset": engine.reset, "keep": lambda seq: engine.keep(1)}[edit](0)
    assert drafted(engine, {0: 3})[0] == {0: []}  # nothing held, nothing to draft behind
    engine.append(text[:12])
    check(engine, judge, text[12])
    check(engine, judge, text[9], 1)


@pytest.mark.parametrize(
    "choices",
    [{}, {"rewind": 2}, {"rewind": 9}, {"sequences": 2}, {"context": 100}],
    ids=str,
)
def test_a_saved_sequence_drafts_on(
    engine: Engine,
    bundles: Bundles,
    judge: Judge,
    text: list[int],
    tmp_path: Path,
    choices: dict[str, int],
) -> None:
    engine.append(text[:34])
    drafted(engine, {0: 3})
    engine.save(tmp_path / "state", [0])
    with load(bundle_of(bundles, capacity=with_capacity(**choices))) as other:
        other.append(text[50:60], 1)
        other.restore(tmp_path / "state", {0: 1})
        count = min(DRAFTS, other.manifest.capacity.rewind)
        check(other, judge, text[34], 1, count=count)
        other.append(text[34:45], 1)
        check(other, judge, text[45], 1, count=count)


def test_a_file_without_drafting_starts_drafts_anew(
    engine: Engine, bundles: Bundles, judge: Judge, text: list[int], tmp_path: Path
) -> None:
    with load(bundle_of(bundles), draft=False) as plain:
        plain.append(text[:20])
        plain.save(tmp_path / "state")
    engine.append(text[:20])
    engine.restore(tmp_path / "state")
    assert drafted(engine, {0: text[20]})[0] == {0: []}
    engine.append(text[20:21])
    check(engine, judge, text[21], known_from=20)
    engine.append(text[21:40])
    check(engine, judge, text[40], known_from=20)
    engine.save(tmp_path / "back")
    with load(bundle_of(bundles), draft=False) as plain:
        plain.restore(tmp_path / "back")
        assert plain.tokens(0) == tuple(text[:40])


def _fields(path: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    with safe_open(path, "numpy") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_a_file_whose_draft_part_does_not_fit_changes_nothing(
    engine: Engine, judge: Judge, text: list[int], tmp_path: Path
) -> None:
    from cachegraph.runtime import saved

    engine.append(text[:20])
    drafter = engine._store.drafter
    assert drafter is not None
    stored = drafter.stored

    def wrong(seq: int) -> tuple[saved.SavedDraft, dict[str, Any]]:
        part, rows = stored(seq)
        return part.model_copy(update={"end": part.end + 1}), rows

    def narrow(seq: int) -> tuple[saved.SavedDraft, dict[str, Any]]:
        part, rows = stored(seq)
        return part, {name: values[:, :-1].copy() for name, values in rows.items()}

    for number, spoil in enumerate((wrong, narrow)):
        drafter.stored = spoil  # type: ignore[method-assign]
        engine.save(tmp_path / str(number))
    drafter.stored = stored  # type: ignore[method-assign]
    engine.append(text[20:25])
    for number, message in enumerate(("draft part", "has shape")):
        with pytest.raises(StateFileError, match=message):
            engine.restore(tmp_path / str(number))
    metadata, tensors = _fields(tmp_path / "0")
    del tensors["0.carried"]
    save_file(tensors, tmp_path / "2", metadata)
    with pytest.raises(StateFileError, match="missing"):
        engine.restore(tmp_path / "2")
    check(engine, judge, text[25])


@pytest.mark.parametrize(
    "choices",
    [{"capacity": with_capacity(pinned=3)}, {"raw": RowSharing.UNIFIED}],
    ids=["pinned", "unified"],
)
def test_pinned_and_unified_rows_draft_from_their_own_streams(
    bundles: Bundles, text: list[int], choices: dict[str, Any]
) -> None:
    """Self-consistent: pinned rows are not the published model, so no twin is asked."""
    with load(bundle_of(bundles, **choices)) as engine:
        engine.append(text[:30])
        engine.copy(0, 2)
        found = drafted(engine, {2: text[30]})[0][2]
        engine.append(text[30:33], 2)
        engine.remove(2, 31)
        engine.clear(1)
        feed(engine, 1, text[:31], [1] * 31)
        wanted = drafted(engine, {1: text[31]})
        got = drafted(engine, {2: text[31]})
        assert np.abs(np.stack(got[1][2]) - np.stack(wanted[1][1])).max() <= NEAR
        assert len(found) == DRAFTS


@pytest.mark.parametrize("form", [CacheType.F16, CacheType.BF16])
def test_smaller_caches_draft_nearly_the_same(
    bundles: Bundles, judge: Judge, text: list[int], form: CacheType
) -> None:
    with load(bundle_of(bundles, cache=form)) as engine:
        engine.append(text[:40])
        _, seen = drafted(engine, {0: text[40]}, 1)
        _, logits = judge.drafts(text[:40], text[40], 1)
        assert np.abs(seen[0][0] - logits[0]).max() <= 0.05


def test_rewind_budgets_of_none_and_one(
    bundles: Bundles, judge: Judge, text: list[int]
) -> None:
    for rewind in (0, 1):
        with load(bundle_of(bundles, capacity=with_capacity(rewind=rewind))) as engine:
            feed(engine, 0, text, [1, 5, 1, 1, 9])
            if rewind:
                check(engine, judge, text[17], count=1)
            else:
                with pytest.raises(ConfigError, match="1 to 0"):
                    drafted(engine, {0: text[17]}, 1)


def failing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = engine._store.drafter
    assert drafter is not None

    def fail(call: Any) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(drafter.graph, "run", fail)


def test_a_draft_graph_that_fails_beside_a_step_costs_the_warm_start_alone(
    engine: Engine, judge: Judge, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.append(text[:10])
    failing(engine, monkeypatch)
    engine.append(text[10:30])  # too long for its pairs to wait
    monkeypatch.undo()
    assert engine.length(0) == 30
    assert drafted(engine, {0: text[30]})[0] == {0: []}
    engine.append(text[30:32])
    check(engine, judge, text[32], known_from=30)


def test_a_draft_that_fails_changes_no_sequence(
    engine: Engine, judge: Judge, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.append(text[:20])
    failing(engine, monkeypatch)
    with pytest.raises(StepError, match="no sequence has changed"):
        drafted(engine, {0: text[20]})
    monkeypatch.undo()
    assert engine.tokens(0) == tuple(text[:20])
    engine.append(text[20:22])
    check(engine, judge, text[22], known_from=20)


def test_a_choice_that_raises_leaves_the_drafter_as_it_was(
    engine: Engine, judge: Judge, text: list[int]
) -> None:
    engine.append(text[:20])
    calls: list[int] = []

    def choose(seq: int, row: Logits) -> int:
        calls.append(seq)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return 3

    with pytest.raises(KeyboardInterrupt):
        engine.draft({0: text[20]}, 3, choose)
    check(engine, judge, text[20])


def ask(pending: dict[int, int], count: Any) -> Callable[[Engine], object]:
    return lambda engine: engine.draft(pending, count, lambda seq, row: 0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (ask({9: 1}, 2), UsageError, "no sequence 9"),
        (ask({0: CONFIG.vocab_size}, 2), BatchError, "not in the vocabulary"),
        (ask({0: -1}, 2), BatchError, "not in the vocabulary"),
        (ask({0: 1}, 0), ConfigError, "0 drafts asked for"),
        (ask({0: 1}, {0: CAPACITY.rewind + 1}), ConfigError, "can be taken back"),
    ],
)
def test_what_cannot_be_drafted_is_refused(
    engine: Engine,
    judge: Judge,
    text: list[int],
    call: Callable[[Engine], object],
    error: type[CachegraphError],
    message: str,
) -> None:
    engine.append(text[:12])
    with pytest.raises(error, match=message):
        call(engine)
    check(engine, judge, text[12])


def test_drafts_end_with_the_context(bundles: Bundles, text: list[int]) -> None:
    with load(bundle_of(bundles, capacity=replace(CAPACITY, context=24))) as engine:
        engine.append(text[:20])
        assert len(drafted(engine, {0: 1}, 3)[0][0]) == 3
        engine.append(text[20:21])
        with pytest.raises(CapacityError, match="do not fit the context of 24"):
            drafted(engine, {0: 1}, 3)


def test_an_engine_without_drafting_is_as_if_there_were_no_block(
    bundles: Bundles, text: list[int]
) -> None:
    plain = load(bundle_of(bundles, with_draft=False), draft=False)
    with load(bundle_of(bundles), draft=False) as engine, plain:
        assert not engine.can_draft
        assert np.array_equal(engine.append(text[:30]), plain.append(text[:30]))
        assert engine.memory == plain.memory
        sizes = {"streams": 1, "step": 16, "context": 64}
        assert engine.reserve(**sizes) == plain.reserve(**sizes)
        bound = [set(call.results) for call in engine._graph.calls.values()]  # type: ignore[union-attr]
        assert all(names == {"logits", "embeddings"} for names in bound)
        with pytest.raises(UsageError, match="draft=True"):
            drafted(engine, {0: 1})


def test_a_bundle_without_the_block_is_not_opened_for_drafting(bundles: Bundles) -> None:
    with pytest.raises(ConfigError, match="has no draft graph"):
        load(bundle_of(bundles, with_draft=False))


def test_memory_counts_what_drafting_holds(engine: Engine) -> None:
    drafter = engine._store.drafter
    assert drafter is not None
    caches = [*engine._store.caches.values(), *drafter._caches.values()]
    held = sum(buffer.array.nbytes for buffer in caches)
    held += sum(carried.rows.nbytes for carried in drafter._carried)
    assert engine.memory.total == held
    assert engine.memory.breakdown()["cpu"]["carried"] > 0


@pytest.mark.parametrize("draft", [1, DRAFTS])
def test_greedy_texts_are_those_without_drafting(
    engine: Engine, text: list[int], draft: int
) -> None:
    prompts = [text[:20], text[20:27], text[30:60]]

    def ids(count: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        options = GenerateOptions(max_tokens=24, draft=count, ignore_eos=True)
        for event in engine.generate(prompts, options):
            found.setdefault(event.prompt, []).append(event.choice.token)
        return found

    assert ids(draft) == ids(0)
