"""The planner of recurrent states, played on a dictionary of rows."""

from __future__ import annotations

import dataclasses
import random
import re

import numpy as np
import pytest

from cachegraph.models.buckets import Bucket
from cachegraph.models.errors import ConfigError, PlanError, RewindError
from cachegraph.models.recurrent_spec import START, RecurrentSpec
from cachegraph.runtime.planners.recurrent import (
    RecurrentPlan,
    Standing,
    plan_recurrent,
    validate_recurrent,
)

pytestmark = pytest.mark.r0

SEQUENCES = 3
Text = tuple[int, ...]


class Rows:
    """Rows that hold the text of which they are the state; a row never written is poison."""

    def __init__(self, spec: RecurrentSpec) -> None:
        self.spec = spec
        self.start = spec.layout(SEQUENCES, Bucket(streams=1, step=1, context=1)).sentinel(
            START
        )
        self.rows: dict[int, Text] = {self.start: ()}
        self.texts: dict[int, Text] = dict.fromkeys(range(SEQUENCES), ())
        self.standings: dict[int, Standing] = {}
        self.num_tokens = 0

    def decode(self, streams: list[int], step: int) -> RecurrentPlan:
        plan = plan_recurrent(
            self.spec,
            streams=streams,
            step=step,
            standings=self.standings,
            start=self.start,
        )
        validate_recurrent(
            self.spec, plan, streams=streams, sequences=SEQUENCES, start=self.start
        )
        states = {}
        for at, seq in enumerate(streams):
            state = self.rows[int(plan.state_read_idxs[at])]
            assert state == self.texts[seq]
            for token in range(at * step, (at + 1) * step):
                self.num_tokens += 1
                state = (*state, self.num_tokens)
                states[token] = state
            self.texts[seq] = state
        sources, rows = plan.state_write_src_idxs, plan.state_write_dst_idxs
        self.rows |= {
            int(row): states[int(token)]
            for token, row in zip(sources.ravel(), rows.ravel(), strict=True)
        }
        self.standings |= plan.standings
        return plan


@pytest.mark.parametrize("snapshots", [0, 1, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_every_state_in_reach_is_that_of_its_text(snapshots: int, seed: int) -> None:
    rng = random.Random(seed)
    world = Rows(RecurrentSpec(snapshots=snapshots))
    for _ in range(60):
        streams = rng.sample(range(SEQUENCES), rng.randint(1, SEQUENCES))
        world.decode(streams, rng.choice([1, 1, 2, 5, 11]))
        seq = rng.choice(streams)
        standing, text = world.standings[seq], world.texts[seq]
        for length in range(1, len(text) + 1):
            is_kept = world.rows.get(world.spec.row(seq, length)) == text[:length]
            assert standing.reaches(length) <= is_kept
        assert standing.depth == min(snapshots, standing.depth)
        if rng.random() < 0.5:
            back = rng.randint(0, standing.depth)
            world.standings[seq] = standing.rewound(standing.length - back)
            world.texts[seq] = text[: len(text) - back]


def test_a_new_sequence_starts_from_zeros_whatever_its_rows_hold() -> None:
    world = Rows(RecurrentSpec(snapshots=2))
    world.decode([1], 4)
    world.standings[1] = world.standings[1].rewound(0)
    world.texts[1] = ()
    assert world.decode([1], 1).state_read_idxs.tolist() == [world.start]


def test_what_is_out_of_reach_is_named() -> None:
    standing = Standing().after(20, 3)
    assert [n for n in range(22) if standing.reaches(n)] == [0, 17, 18, 19, 20]
    with pytest.raises(RewindError, match="there are states after 0 and after 17 to 20"):
        standing.rewound(16)
    assert standing.rewound(18).rewound(17) == Standing(length=17, depth=0)


def test_more_than_eight_snapshots_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 to 8 are kept"):
        RecurrentSpec(snapshots=9)


def test_spare_rows_are_as_many_as_the_largest_bucket_writes() -> None:
    layout = RecurrentSpec(snapshots=2).layout(5, Bucket(streams=4, step=7, context=1))
    assert (layout.live_rows, layout.spare_rows, layout.rows) == (15, 12, 28)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("state_read_idxs", [1, 9], "state_read_idxs[0]: row 1 is not of sequence 2"),
        ("state_read_idxs", [9], "state_read_idxs: has 1 entries, wanted 2"),
        ("state_write_src_idxs", [[0], [2]], "state_write_src_idxs[1]: 2 is outside 0 to 1"),
        ("state_write_dst_idxs", [[6], [9]], "state_write_dst_idxs[1]: 9 is outside 0 to 8"),
        (
            "state_write_dst_idxs",
            [[7], [7]],
            "state_write_dst_idxs[1]: row 7 is written twice",
        ),
        (
            "state_write_dst_idxs",
            [[7], [3]],
            "state_write_dst_idxs[1]: [3] are not of sequence 0",
        ),
    ],
)
def test_a_plan_of_other_rows_is_named(field: str, value: object, message: str) -> None:
    spec = RecurrentSpec(snapshots=2)
    plan = plan_recurrent(spec, streams=[2, 0], step=1, standings={}, start=9)
    broken = dataclasses.replace(plan, **{field: np.array(value)})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=re.escape(f"recurrent plan: {message}")):
        validate_recurrent(spec, broken, streams=[2, 0], sequences=3, start=9)
