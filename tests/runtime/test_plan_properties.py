"""Random programs of batches, judged by a dictionary of labels apart from the planners."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_world import World, config

from cachegraph.models.capacity import Capacity
from cachegraph.models.deepseek_v4.config import LayerKind
from cachegraph.models.errors import CapacityError

pytestmark = pytest.mark.r0

CONTEXT = 29


@st.composite
def programs(draw: st.DrawFn) -> list[list[int]]:
    """Batches as lists of owners, or a lone negative number that clears a sequence."""
    sequence = st.integers(0, 2)
    batch = st.lists(sequence, min_size=1, max_size=14)
    clear = sequence.map(lambda seq: [-1 - seq])
    return draw(st.lists(st.one_of(batch, batch, batch, clear), min_size=1, max_size=12))


@settings(max_examples=120, derandomize=True, deadline=None)
@given(
    program=programs(),
    window=st.integers(1, 8),
    max_step=st.integers(1, 9),
    pinned=st.sampled_from([0, 0, 1, 3, 10]),
)
def test_every_token_sees_exactly_its_past(
    program: list[list[int]], window: int, max_step: int, pinned: int
) -> None:
    sizes = {"context": CONTEXT, "sequences": 3, "max_step": max_step, "pinned": pinned}
    world = World(config(window=window), Capacity(**sizes))
    for owners in program:
        if owners[0] < 0:
            world.cells.clear(-1 - owners[0])
            continue
        counts = {seq: owners.count(seq) for seq in dict.fromkeys(owners)}
        fits = all(world.cells.next_position(s) + n <= CONTEXT for s, n in counts.items())
        if fits:
            world.decode(counts, owners)
        else:
            before = world.cells.next_positions()
            with pytest.raises(CapacityError, match="is full"):
                world.decode(counts, owners)
            assert world.cells.next_positions() == before


@pytest.mark.parametrize("layers", [[LayerKind.WINDOW], [LayerKind.CSA], [LayerKind.HCA]])
def test_models_with_one_kind_of_layer(layers: list[LayerKind]) -> None:
    world = World(config(layers=layers), Capacity(context=CONTEXT, sequences=2, max_step=6))
    for counts in ({0: 5, 1: 2}, {1: 1}, {0: 1, 1: 1}, {0: 11}, {0: 1}):
        world.decode(counts)


@pytest.mark.parametrize(
    ("edge", "before", "after"), list(product([3, 5, 6, 7, 14, 21], [-1, 0, 1], [1, 2, 3]))
)
def test_steps_around_every_boundary(edge: int, before: int, after: int) -> None:
    """A prefill that ends before, at or past a ratio, window or ring edge, then a short step."""
    world = World(config(), Capacity(context=CONTEXT, sequences=1, max_step=6))
    world.decode({0: edge + before})
    world.decode({0: after})
    world.decode({0: 1})


def test_context_exactly_full_in_every_sequence() -> None:
    world = World(config(), Capacity(context=21, sequences=3, max_step=8))
    world.decode({0: 20, 2: 21, 1: 20})
    world.decode({1: 1, 0: 1})
    with pytest.raises(CapacityError, match=r"sequence 1 is full: 21 of 21"):
        world.decode({1: 1})
