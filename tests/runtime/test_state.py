"""States in memory, whole and partial, of both kinds of memory: sizes told beforehand, refusals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from support.bundles import open_engine
from support.engines import Engines
from support.qwen4_exp import random_checkpoint

from cachegraph.graphgen import ExportOptions, export
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import RowSharing
from cachegraph.models.errors import StateFileError
from cachegraph.runtime import Batch, Engine

pytestmark = pytest.mark.r2

SAME = 1e-5
TEXT = np.random.default_rng(7).integers(3, 80, size=60).tolist()
OTHER = np.random.default_rng(8).integers(3, 80, size=60).tolist()


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """A Qwen4-Exp in both forms of sharing."""
    folder = random_checkpoint(tmp_path_factory.mktemp("hybrid"), seed=2, name="plain")
    opened = {}
    for sharing in RowSharing:
        out = tmp_path_factory.mktemp(sharing.value) / "bundle"
        capacity = Capacity(context=64, sequences=3, max_step=32, rewind=4)
        export(folder, out, ExportOptions(capacity=capacity, raw=sharing), static=[])
        opened[sharing.value] = open_engine(out)
    yield opened
    for engine in opened.values():
        engine.close()


@pytest.fixture(params=["window", *(sharing.value for sharing in RowSharing)])
def either(
    request: pytest.FixtureRequest, engines: Engines, hybrids: dict[str, Engine]
) -> Engine:
    engine = engines.get() if request.param == "window" else hybrids[request.param]
    engine.clear()
    return engine


def feed(
    engine: Engine, seq: int, text: list[int], start: int, end: int
) -> NDArray[np.float32]:
    """Logits of text[start:end] at the end of a sequence."""
    batch = Batch.of(text[start:end], range(start, end), [seq] * (end - start), logits=True)
    return engine.decode(batch)


def close(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=SAME)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 9, 26, 41])
@pytest.mark.parametrize("partial", [False, True])
def test_the_size_is_known_beforehand(either: Engine, length: int, partial: bool) -> None:
    if length:
        feed(either, 1, TEXT, 0, length)
    size = either.state_size(1, partial=partial)
    assert size == len(either.state(1, partial=partial))


@pytest.mark.parametrize("length", [1, 9, 26, 41])
def test_a_whole_state_goes_on_in_another_sequence(either: Engine, length: int) -> None:
    feed(either, 0, TEXT, 0, length)
    data = either.state(0)
    wanted = feed(either, 0, TEXT, length, length + 8)
    feed(either, 2, OTHER, 0, 17)
    assert either.set_state(2, data) == length
    close(feed(either, 2, TEXT, length, length + 8), wanted)


@pytest.mark.parametrize(("length", "later"), [(1, 3), (9, 2), (26, 5), (38, 1)])
def test_a_partial_state_takes_back_what_followed(
    either: Engine, length: int, later: int
) -> None:
    """The text that was tried since is another one; a second try starts from the same state."""
    feed(either, 0, OTHER, 0, 20)
    feed(either, 1, TEXT, 0, length)
    data = either.state(1, partial=True)
    wanted = feed(either, 1, TEXT, length, length + 8)
    for _ in range(2):
        assert either.set_state(1, data) == length
        feed(either, 1, OTHER, length, length + later)
    assert either.set_state(1, data) == length
    close(feed(either, 1, TEXT, length, length + 8), wanted)
    untouched = feed(either, 0, OTHER, 20, 24)
    either.clear()
    close(untouched, feed(either, 0, OTHER, 0, 24)[20:])


def test_a_partial_state_is_small_and_reaches_past_the_snapshots(
    hybrids: dict[str, Engine],
) -> None:
    """It holds no attention row, and needs none but those that are there."""
    engine = hybrids["per_stream"]
    engine.clear()
    feed(engine, 0, TEXT, 0, 12)
    data = engine.state(0, partial=True)
    wanted = feed(engine, 0, TEXT, 12, 50)
    assert engine.reachable(0) == (range(1), range(46, 51))
    assert engine.state_size(0, partial=True) <= len(data)
    engine.set_state(0, data)
    assert engine.reachable(0) == (range(1), range(8, 13))
    engine.rewind(0, 10)
    close(feed(engine, 0, TEXT, 10, 50)[2:], wanted)


@pytest.mark.parametrize("how", ["shorter", "other text", "empty", "another sequence"])
def test_a_partial_state_without_its_rows_is_refused(either: Engine, how: str) -> None:
    feed(either, 0, TEXT, 0, 20)
    data = either.state(0, partial=True)
    target = 0
    if how == "shorter":
        either.rewind(0, 18)
    elif how == "other text":
        either.rewind(0, 18)
        feed(either, 0, OTHER, 18, 30)
    elif how == "empty":
        either.clear(0)
    else:
        target = 1
        feed(either, 1, OTHER, 0, 30)
    before = either.tokens(target)
    with pytest.raises(StateFileError, match="does not hold these tokens any more"):
        either.set_state(target, data)
    assert either.tokens(target) == before


def test_a_window_that_was_overwritten_is_refused(engine: Engine) -> None:
    """The raw rows of a window model are a ring: far behind, they are gone."""
    feed(engine, 0, TEXT, 0, 10)
    data = engine.state(0, partial=True)
    feed(engine, 0, TEXT, 10, 60)
    with pytest.raises(StateFileError, match="its window at 10 tokens has been overwritten"):
        engine.set_state(0, data)
    assert engine.length(0) == 60


def test_damaged_and_foreign_states_are_refused(either: Engine) -> None:
    feed(either, 0, TEXT, 0, 9)
    data = either.state(0)
    flipped = bytearray(data)
    flipped[-1] ^= 1
    for bad, message in (
        (bytes(flipped), "damaged"),
        (data[:-5], "damaged or no saved state"),
        (b"", "damaged or no saved state"),
    ):
        with pytest.raises(StateFileError, match=message):
            either.set_state(1, bad)
    assert either.length(1) == 0
