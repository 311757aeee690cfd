"""The planner of pooled keys, judged step by step by a dictionary of cells and keys."""

from __future__ import annotations

import dataclasses
import random
import re

import numpy as np
import pytest
from support.pool_world import PoolWorld, play, pooled_spec

from cachegraph.models.errors import ConfigError, PlanError
from cachegraph.models.pooled_spec import Grouping, cache_pools, new_pools
from cachegraph.runtime.planners.pool_layout import PoolCells
from cachegraph.runtime.planners.pool_lists import pool_lists
from cachegraph.runtime.planners.pool_validate import validate_pool_tokens, validate_pooled
from cachegraph.runtime.planners.pooled import PooledPlan, PoolTokens, plan_pooled

pytestmark = pytest.mark.r0


@pytest.mark.parametrize("grouping", Grouping)
@pytest.mark.parametrize("is_unified", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_read_no_stale_key(
    grouping: Grouping, is_unified: bool, seed: int
) -> None:
    """Layouts grown step by step are those built from the cells; keys those of their members."""
    rng = random.Random(seed)
    spec = pooled_spec(rng.choice([2, 3, 5]), grouping)
    sequences = rng.randint(1, spec.pool)
    world = PoolWorld(spec, sequences=sequences, size=50, is_unified=is_unified)
    play(world, rng, 40)


def test_decoding_makes_each_pool_once() -> None:
    world = PoolWorld(pooled_spec(3), sequences=2)
    world.append(0, 10)
    for _ in range(12):
        world.append(0, 1)
        world.append(1, 1)
    assert world.made == 22 // 3 + 12 // 3


def test_shared_cells_are_pooled_once() -> None:
    world = PoolWorld(pooled_spec(3), sequences=3)
    plan = world.decode(range(7), [(0, 2)] * 7)
    assert plan.num_pools == 4
    assert plan.new_pools.tolist() == [0, 1]


def test_absent_sequences_are_pooled_again_where_they_are_stale() -> None:
    world = PoolWorld(pooled_spec(3), sequences=2, is_unified=False)
    world.append(0, 7)
    world.append(1, 7)
    world.remove(0, 1, 2)
    plan = world.append(1, 1)
    assert plan.new_pools.tolist() == [0, 1]
    lists = pool_lists(world.spec, world.view(), plan, {1})
    assert lists.pool_idxs[:2].tolist() == [[60] * 3] * 2
    assert world.append(1, 1).new_pools.tolist() == [4]


def test_pools_that_meet_in_a_row_get_a_row_each() -> None:
    """The copy loses three tokens: its last pools end where the source's do."""
    world = PoolWorld(pooled_spec(3), sequences=2)
    world.append(0, 9)
    world.copy(0, 1)
    world.remove(1, 1, 4)
    plan = world.append(0, 1)
    assert plan.num_pools == 5
    lists = pool_lists(world.spec, world.view(), plan, {0})
    assert len(set(lists.pool_cells.tolist())) == 4  # the last pool of both is the same


def test_a_failed_step_is_made_up_for() -> None:
    world = PoolWorld(pooled_spec(3), sequences=1)
    world.append(0, 4)
    world.decode([4, 5], [(0,)] * 2, fails=True)
    assert world.append(0, 1).new_pools.tolist() == [1]


def test_repeats_rank_by_insertion_and_late_tokens_pool_again() -> None:
    world = PoolWorld(pooled_spec(3), sequences=1)
    world.decode([0, 1, 1, 1, 1, 5], [(0,)] * 6)
    assert world.decode([1], [(0,)]).new_pools.tolist() == [1]
    assert world.decode([0], [(0,)]).new_pools.tolist() == [0, 1]


def test_places_are_those_of_the_first_member() -> None:
    positions = np.array([0, 1, 1, 1, 2, -1])
    places = np.array([[0, 0, 0], [1, 5, 6], [1, 5, 7], [1, 6, 6], [2, 2, 2], [0, 0, 0]])
    cells = PoolCells(
        positions=positions,
        members=(positions >= 0)[None],
        orders=np.arange(6),
        is_unified=True,
        cells_per_stream=6,
        places=places,
    )
    tokens = PoolTokens(rows=np.arange(5), positions=positions[:5], owners=((0,),) * 5)
    plan = plan_pooled(pooled_spec(2), cells, tokens, layouts={}, stale={})
    assert plan.new_pool_pos.tolist() == [[0, 0, 0], [1, 5, 7]]


def test_the_bound_of_new_pools_holds_and_keeps_still() -> None:
    for size in (2, 3, 5):
        for tokens in range(1, 24):
            most = max((first + tokens) // size - first // size for first in range(size))
            assert most <= new_pools(size, tokens, 1, 1000)
    assert {new_pools(4, 1, 3, 1000), new_pools(4, 3, 3, 1000)} == {3}
    assert new_pools(4, 40, 3, cache_pools(4, 19, 1)) == 4


def test_a_spec_whose_budget_is_no_multiple_is_refused() -> None:
    with pytest.raises(ConfigError, match="a budget is a multiple of it"):
        dataclasses.replace(pooled_spec(3), budget=7)


def test_a_token_of_another_stream_is_refused() -> None:
    world = PoolWorld(pooled_spec(3), sequences=2, is_unified=False)
    tokens = world.place([0], [(1,)])
    world.cells[int(tokens.rows[0])].owners.add(0)
    shared = dataclasses.replace(tokens, owners=((0, 1),))
    with pytest.raises(
        PlanError, match=r"\(0, 1\) share a token, but their streams are separate"
    ):
        validate_pool_tokens(world.view(), shared)
    strayed = dataclasses.replace(tokens, owners=((0,),))
    with pytest.raises(PlanError, match="row 60 is not of the stream of sequence 0"):
        validate_pool_tokens(world.view(), strayed)


def test_a_row_reserved_twice_is_refused() -> None:
    world = PoolWorld(pooled_spec(3), sequences=1)
    tokens = world.place([0, 1], [(0,)] * 2)
    twice = dataclasses.replace(tokens, rows=tokens.rows[[0, 0]])
    with pytest.raises(PlanError, match=r"k_idxs\[1\]: row 0 is written twice, first at 0"):
        validate_pool_tokens(world.view(), twice)


def test_a_cell_moved_without_a_mark_has_its_pool_made_anew() -> None:
    """Keys are rotated at positions: a pool is known by those too."""
    world = PoolWorld(pooled_spec(3), sequences=1)
    world.decode([0, 2, 4, 6, 7, 9], [(0,)] * 6)
    world.of(0)[1][1].position = 3
    assert world.decode([8], [(0,)]).new_pools.tolist() == [0, 1]


Case = tuple[PoolCells, PoolTokens, PooledPlan]


@pytest.fixture
def case() -> Case:
    """Seven tokens of one sequence in two, planned but for its last token."""
    world = PoolWorld(pooled_spec(3), sequences=2, size=11)
    world.append(0, 6)
    tokens = world.place([6], [(0,)])
    cells = world.view()
    return cells, tokens, plan_pooled(world.spec, cells, tokens, layouts={}, stale={})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.array([22])}, "pool plan: k_idxs[0]: 22 is outside 0 to 10"),
        ({"positions": np.array([5])}, "is reserved for position 6, the token's is 5"),
        ({"owners": ((),)}, "pool plan: owners[0]: () is not among the 2 sequences"),
        ({"owners": ((2,),)}, "(2,) is not among the 2 sequences"),
        ({"owners": ((0, 1),)}, "does not belong to every one of (0, 1)"),
        ({"owners": ()}, "owners: has 0 entries, wanted 1"),
    ],
)
def test_tokens_without_their_cell_are_refused(
    case: Case, change: dict[str, object], message: str
) -> None:
    cells, tokens, _ = case
    validate_pool_tokens(cells, tokens)
    with pytest.raises(PlanError, match=re.escape(message)):
        validate_pool_tokens(cells, dataclasses.replace(tokens, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("k_idxs", [0, 1], "k_idxs: has 2 entries, wanted 1"),
        ("new_pool_idxs", [[0, 1, 2], [3, 11, 4]], "new_pool_idxs[4]: 11 is outside 0 to 10"),
        ("tail_idxs", [[-1, 0]], "tail_idxs[0]: -1 is outside 0 to 11"),
        ("mask_n", [3], "mask_n[0]: 3 is outside 0 to 2"),
        ("mask_start", [1], "mask_start[0]: 3 is outside 0 to 2"),
        ("new_pool_rep", [0, 0], "new_pool_rep[1]: row 0 is written twice, first at 0"),
        ("new_pool_pos", [[0, 0, 0]], "new_pool_pos: has 3 entries, wanted 6"),
    ],
)
def test_a_plan_out_of_bounds_is_named(
    case: Case, field: str, value: object, message: str
) -> None:
    cells, tokens, plan = case
    validate_pooled(pooled_spec(3), cells, tokens, plan)
    broken = dataclasses.replace(plan, **{field: np.array(value)})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=re.escape(f"pool plan: {message}")):
        validate_pooled(pooled_spec(3), cells, tokens, broken)


def test_a_key_outside_its_pool_is_named(case: Case) -> None:
    cells, tokens, plan = case
    reps = plan.new_pool_rep.copy()
    reps[1] = tokens.rows[0]
    broken = dataclasses.replace(plan, new_pool_rep=reps)
    with pytest.raises(
        PlanError, match=r"new_pool_rep\[1\]: row \d+ is no member of its pool"
    ):
        validate_pooled(pooled_spec(3), cells, tokens, broken)


def test_coupled_tokens_need_one_history() -> None:
    world = PoolWorld(pooled_spec(3), sequences=2)
    world.decode(range(4), [(0, 1)] * 4)
    world.append(1, 1)
    with pytest.raises(PlanError, match=r"owners\[1\]: the histories of \(0, 1\) differ"):
        world.decode([4, 5], [(0,), (0, 1)])


def test_a_pool_without_a_row_for_its_key_is_refused() -> None:
    """One sequence keeps keys in the rows of tokens 1 and 3, the other would pool just these."""
    world = PoolWorld(pooled_spec(2), sequences=2)
    world.append(0, 4)
    world.copy(0, 1)
    world.remove(1, 0, 1)
    world.remove(1, 2, 3)
    with pytest.raises(
        PlanError, match="a pool of sequence 1, holds another pool's key; give"
    ):
        world.append(0, 1)
