"""Pairs for the draft graph, what its twin says of them, and a world that runs the graph.

A text whose narrowest cut is a cliff is drawn again here; nothing is excused when compared.
Knows no engine: the carried streams are given by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.emitted import Array, World, open_session, run

from cachegraph.models.contract import CARRIED
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.twin import TwinRun, forward
from cachegraph.models.deepseek_v4.twin_draft import DraftRun, draft_forward
from cachegraph.models.manifest import DraftEntry, read_manifest

CLIFF = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """A text [T + 1], the main twin's run of it, and the draft twin's run of its T pairs."""

    text: NDArray[np.int64]
    main: TwinRun
    draft: DraftRun

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The token of each pair."""
        return self.text[1:]

    @property
    def streams(self) -> NDArray[np.float64]:
        """The streams before each of them, [T, M, D]."""
        return self.main.streams[:-1]


def draw_pairs(
    config: DeepseekV4Config, weights: Mapping[str, Array], size: int, seed: int = 0
) -> Pairs:
    """`size` pairs, of the first seed from `seed` on without a near tie."""
    for draw in range(seed, seed + 4000, 100):
        text = np.random.default_rng(draw).integers(config.vocab_size, size=size + 1)
        main = forward(config, weights, text)
        draft = draft_forward(config, weights, main.streams[:-1], text[1:])
        if min(main.smallest_gap, draft.layer.router_gap.min()) >= CLIFF:
            return Pairs(text=text, main=main, draft=draft)
    raise AssertionError(f"no seed gives a text of {size} without a near tie")


class DraftWorld:
    """Runs a bundle's draft graph call by call, with caches outside any engine."""

    def __init__(self, folder: Path) -> None:
        entry = read_manifest(folder).draft
        assert entry is not None
        self.entry: DraftEntry = entry
        self._world = World(
            contract=entry.contract, planners=entry.planners, ladder=entry.ladder, first=1
        )
        self._session = open_session(folder / entry.template)

    @property
    def caches(self) -> Mapping[str, Array]:
        """Cache rows by contract name."""
        return self._world.caches

    def step(
        self, pairs: Mapping[int, tuple[NDArray[np.int64], Array]]
    ) -> dict[int, tuple[Array, Array]]:
        """Tokens [n] and streams [n, ...] by sequence -> logits [n, vocab], streams [n, M*D]."""
        plan = self._world.plan({seq: tokens for seq, (tokens, _) in pairs.items()})
        bucket = self._world.bucket(plan)
        sizes = self.entry.dims(bucket)
        count, step = plan.ubatch.step, bucket.step
        feeds = self._world.feeds(plan, bucket)
        row = self.entry.contract[CARRIED]
        carried = np.zeros(row.resolve(sizes), row.dtype.numpy)
        by_stream = carried.reshape(bucket.streams, step, -1)
        for place, seq in enumerate(plan.ubatch.streams):
            by_stream[place, :count] = np.reshape(pairs[seq][1], (count, -1))
        names = [output.name for output in self.entry.contract.outputs]
        values = run(self._session, {**feeds, CARRIED: carried})
        found = dict(zip(names, values, strict=True))
        written = {s.name: found[s.out_name] for s in self.entry.contract.caches}
        self._world.commit(plan, written)
        streams = found["streams"].reshape(bucket.streams, step, -1)
        return {
            seq: (found["logits"][place * count :][:count], streams[place, :count])
            for place, seq in enumerate(plan.ubatch.streams)
        }
