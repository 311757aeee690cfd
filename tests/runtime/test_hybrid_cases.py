"""What went wrong for users of other engines with hybrid memory, as small scenarios.

Each is judged by a cold run of the same text in one step on a fresh sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save
from support.bundles import Bundles, open_engine

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, RowSharing
from cachegraph.models.errors import BatchError, StateFileError
from cachegraph.runtime import Batch, Engine
from cachegraph.runtime.hybrid import HybridMemory
from cachegraph.runtime.planners.ngram import plan_ngram
from cachegraph.runtime.planners.step import StepPlan

pytestmark = pytest.mark.r2

REWIND, COLD = 4, 3  # the sequence that cold runs take
END = 5  # of the tiny config: where n-grams are cut
RNG = np.random.default_rng(11)
TEXT = RNG.integers(6, 90, size=60).tolist()
JUNK = RNG.integers(6, 90, size=60).tolist()
TEXT[17] = END


@pytest.fixture(scope="module")
def opened(bundles: Bundles) -> Iterator[dict[RowSharing, Engine]]:
    checkpoint = bundles.qwen_checkpoint("plain", index_heads=16)
    capacity = Capacity(context=64, sequences=4, max_step=32, rewind=REWIND)
    engines = {
        sharing: open_engine(bundles.bundle(checkpoint, capacity=capacity, raw=sharing))
        for sharing in RowSharing
    }
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(params=RowSharing)
def engine(request: pytest.FixtureRequest, opened: dict[RowSharing, Engine]) -> Engine:
    opened[request.param].clear(data=True)
    return opened[request.param]


def feed(
    engine: Engine, seq: int, text: list[int], start: int, end: int
) -> NDArray[np.float32]:
    batch = Batch.of(text[start:end], range(start, end), [seq] * (end - start), logits=True)
    return engine.decode(batch)


def memory(engine: Engine) -> HybridMemory:
    found = engine._store.table
    assert isinstance(found, HybridMemory)
    return found


def newest_states(engine: Engine, seq: int) -> dict[str, NDArray[np.float32]]:
    rows = memory(engine).stored(seq).rows
    return {
        spec.name: engine._store.caches[spec.name].array[rows[spec.kind][-1]].copy()
        for spec in engine.manifest.contract.caches
        if spec.kind.is_recurrent
    }


def same(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("accepted", range(REWIND + 1))
def test_rejected_drafts_leave_no_convolution_history(engine: Engine, accepted: int) -> None:
    """Matrices and both convolutions go back, whatever number of four drafts is accepted."""
    feed(engine, 0, TEXT, 0, 22)
    drafts = TEXT[: 22 + accepted] + JUNK[22 + accepted : 26]
    feed(engine, 0, drafts, 22, 26)
    engine.remove(0, 22 + accepted)
    found = feed(engine, 0, TEXT, 22 + accepted, 28 + accepted)
    same(found, feed(engine, COLD, TEXT, 0, 28 + accepted)[22 + accepted :])
    cold = newest_states(engine, COLD)
    for name, row in newest_states(engine, 0).items():
        np.testing.assert_allclose(row, cold[name], rtol=0, atol=1e-5, err_msg=name)


def ids_of_next(
    engine: Engine, seq: int, monkeypatch: pytest.MonkeyPatch
) -> NDArray[np.int64]:
    """The n-gram ids planned for the next three tokens of a text in a sequence."""
    plans: list[StepPlan] = []
    commit = memory(engine).commit
    with monkeypatch.context() as patch:
        patch.setattr(
            memory(engine), "commit", lambda plan: (plans.append(plan), commit(plan))[1]
        )
        start = engine.length(seq)
        feed(engine, seq, TEXT, start, start + 3)
    assert plans[0].ngram_ids is not None
    return plans[0].ngram_ids


@pytest.mark.parametrize("length", [1, 2, 16, 18, 19, 30])
@pytest.mark.parametrize("how", ["reject", "reuse", "restore", "fork", "state"])
def test_ngrams_follow_the_text_that_is_held(
    engine: Engine, length: int, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After an end token too, and where the history is shorter than an n-gram."""
    feed(engine, 0, TEXT, 0, length)
    seq = 0
    if how == "reject":
        feed(engine, 0, JUNK, length, length + 3)
        engine.rewind(0, length)
    elif how == "reuse":
        engine.prefill(TEXT[:length], 0)
    elif how == "restore":
        engine.save(tmp_path / "state")
        feed(engine, 2, JUNK, 0, 9)
        engine.restore(tmp_path / "state", {0: 2})
        seq = 2
    elif how == "fork":
        feed(engine, 1, JUNK, 0, 9)
        engine.copy(0, 1)
        seq = 1
    else:
        data = engine.state(0, partial=True)
        feed(engine, 0, JUNK, length, length + 7)
        engine.set_state(0, data)
    (spec,) = engine.manifest.planners.ngrams
    tokens = np.array(TEXT[: length + 3], np.int64)
    wanted = plan_ngram(spec, tokens=tokens, streams=[0], histories={})
    assert ids_of_next(engine, seq, monkeypatch).tolist() == wanted[-3:].tolist()


def test_a_state_without_a_component_is_refused(engine: Engine) -> None:
    """Indexer keys too: a sequence is restored with every part or not at all."""
    feed(engine, 0, TEXT, 0, 30)
    data = engine.state(0)
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    for name in load(data):
        left = {key: value for key, value in load(data).items() if key != name}
        broken = save(left, metadata=metadata_of(header))
        with pytest.raises(StateFileError, match="missing"):
            engine.set_state(1, broken)
        assert engine.length(1) == 0


def metadata_of(header: bytes) -> dict[str, str]:
    found: dict[str, str] = json.loads(header)["__metadata__"]
    return found


def test_pools_hold_tokens_of_their_own_sequence(opened: dict[RowSharing, Engine]) -> None:
    """Two sequences of 9 and 14 tokens take cells of one pool by turns."""
    engine = opened[RowSharing.UNIFIED]
    engine.clear(data=True)
    for place in range(14):
        for seq, (text, length) in enumerate(((TEXT, 9), (JUNK, 14))):
            if place < length:
                feed(engine, seq, text, place, place + 1)
    for seq, (text, length) in enumerate(((TEXT, 9), (JUNK, 14))):
        engine.clear(COLD)
        feed(engine, COLD, text, 0, length)
        pools = [memory(engine)._layouts[one].reps for one in (seq, COLD)]
        assert [rows.size for rows in pools] == [length // 4] * 2
        for spec in engine.manifest.contract.caches:
            if spec.kind is CacheKind.POOLED:
                array = engine._store.caches[spec.name].array
                same(array[pools[0]], array[pools[1]])


@pytest.mark.parametrize("length", range(1, 14))
def test_a_context_with_few_pools_is_dense(engine: Engine, length: int) -> None:
    """Fewer pools than a query keeps: one token at a time sees what one step sees."""
    parts = [feed(engine, 0, TEXT, place, place + 1) for place in range(length)]
    same(np.concatenate(parts), feed(engine, COLD, TEXT, 0, length))


def test_a_coupled_token_needs_one_text_at_one_place(engine: Engine) -> None:
    """The same ids at other positions are another history."""
    places = np.repeat(np.arange(9)[:, None], 3, axis=1)
    lower = places + np.array([0, 1, 0])
    for seq, own in enumerate((places, places, lower)):
        engine.decode(Batch.of(TEXT[:9], own, [seq] * 9))
    found = engine.decode(Batch.of(TEXT[9:10], [9], [(0, 1)], logits=True))
    same(found, feed(engine, COLD, TEXT, 0, 10)[9:])
    assert [engine.length(seq) for seq in range(3)] == [10, 10, 9]
    engine.rewind(1, 9)
    with pytest.raises(BatchError, match="different histories"):
        engine.decode(Batch.of(TEXT[9:10], [9], [(1, 2)], logits=True))
    assert [engine.length(seq) for seq in range(3)] == [10, 9, 9]


def test_the_same_question_twice_decodes_one_token(engine: Engine) -> None:
    for length in (13, 16):
        first = engine.prefill(TEXT[:length], 0)
        again = engine.prefill(TEXT[:length], 0)
        assert again.planned == 1
        same(again.logits, first.logits)
