"""Whole tiny models against transformers: any split, any bucket, any neighbour, either dialect.

Options are covered in pairs, not in products: every config meets every split, bucket size, dialect,
lowering and optimisation level; `test_pairs` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.bundles import (
    Bundles,
    Rows,
    largest_difference,
    live_rows,
    open_engine,
    twin_rows,
)
from support.cases import Case, Text, make_case
from support.tiny import CONFIGS

from cachegraph.models.buckets import BucketLadder
from cachegraph.models.capacity import Capacity
from cachegraph.models.export_options import Dialect, Experts, RowRead, RowWrite, Select
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r3

TO_ORACLE = 1e-4  # float32 logits of order 1 to 10, between frameworks
TO_COLD = 1e-5  # float noise of one bundle
SPLITS = ("whole", "single", "random", "neighbours", "buckets")
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"dialect": Dialect.PORTABLE},
    "fused": {"dialect": Dialect.ORT, "gather": RowRead.ND, "select": Select.MASK},
    "wide": {
        "dialect": Dialect.PORTABLE,
        "gather": RowRead.ELEMENTS,
        "scatter": RowWrite.ELEMENTS,
        "experts": Experts.ALL,
    },
}
DEFAULTS = {
    "gather": RowRead.ROWS,
    "scatter": RowWrite.ND,
    "select": Select.GATHER,
    "experts": Experts.CHOSEN,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One engine: a variant's bundle at an optimisation level, and the splits it must stand.

    one_go: a capacity in which the longest text is one call.
    """

    variant: str
    level: str
    splits: tuple[str, ...]
    one_go: bool = False

    @property
    def choices(self) -> dict[str, Any]:
        return {**DEFAULTS, **VARIANTS[self.variant]}

    @property
    def title(self) -> str:
        return f"{self.variant}-{self.level}"


RUNS = (
    Run(variant="plain", level="all", splits=SPLITS),
    Run(variant="plain", level="layout", splits=("random",)),
    Run(variant="fused", level="extended", splits=("whole", "neighbours"), one_go=True),
    Run(variant="fused", level="basic", splits=("random",), one_go=True),
    Run(variant="wide", level="disable", splits=("whole", "neighbours"), one_go=True),
)


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest, bundles: Bundles) -> Case:
    """A random checkpoint with its texts."""
    folder = bundles.checkpoint(request.param)
    return bundles.once(("case", request.param), lambda: make_case(folder))


def engine_of(bundles: Bundles, case: Case, run: Run) -> Engine:
    step = case.context if run.one_go else 24
    capacity = Capacity(context=case.context, sequences=4, max_step=step)
    bundle = bundles.bundle(case.folder, **VARIANTS[run.variant], capacity=capacity)
    return open_engine(bundle, run.level)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Logits of one stretch of a text, and the sequence's live rows after it if it is the end."""

    text: int
    start: int
    logits: npt.NDArray[np.float32]
    rows: Rows | None = None


def cold(engine: Engine, case: Case) -> list[Piece]:
    """Each text alone, in one decode, in caches that nobody used."""
    pieces = []
    for number, text in enumerate(case.texts):
        logits = engine.decode(batch({number: (text, 0, len(text))}))
        pieces.append(
            Piece(text=number, start=0, logits=logits, rows=live_rows(engine, number))
        )
    return pieces


def batch(
    parts: Mapping[int, tuple[Text, int, int]], order: npt.NDArray[np.int64] | None = None
) -> Batch:
    """Tokens start .. end-1 of texts by sequence, interleaved by `order`; all want logits."""
    tokens = np.concatenate([text.tokens[a:b] for text, a, b in parts.values()])
    positions = np.concatenate([np.arange(a, b) for _, a, b in parts.values()])
    owners = np.concatenate([np.full(b - a, seq) for seq, (_, a, b) in parts.items()])
    order = np.arange(len(tokens)) if order is None else order
    return Batch.of(tokens[order], positions[order], owners[order].tolist(), logits=True)


def poison(engine: Engine) -> None:
    """Junk in every row that no sequence owns: it must not show."""
    engine.clear()
    for spec in engine.manifest.contract.caches:
        rows = engine._store.caches[spec.name].array
        rows[: spec.layout.live_rows] = 37.0
        rows[spec.layout.spare_start :] = -41.0


def whole(engine: Engine, case: Case) -> Iterator[Piece]:
    """Each text in one decode, in another sequence than cold."""
    for number, text in enumerate(case.texts):
        seq = (number + 1) % 4
        logits = engine.decode(batch({seq: (text, 0, len(text))}))
        yield Piece(text=number, start=0, logits=logits, rows=live_rows(engine, seq))


def in_steps(engine: Engine, text: Text, seq: int, sizes: Sequence[int]) -> Piece:
    ends = np.minimum(np.cumsum(sizes), len(text))
    starts = ends - np.diff(ends, prepend=0)
    parts = [
        engine.decode(batch({seq: (text, a, b)}))
        for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
        if b > a
    ]
    return Piece(text=0, start=0, logits=np.concatenate(parts), rows=live_rows(engine, seq))


def single(engine: Engine, case: Case) -> Iterator[Piece]:
    """The longest text token by token."""
    yield in_steps(engine, case.texts[0], 2, [1] * len(case.texts[0]))


def random(engine: Engine, case: Case) -> Iterator[Piece]:
    """The longest text in random steps, longer ones than a call holds among them."""
    for seed, seq in ((3, 1), (4, 3)):
        sizes = np.random.default_rng(seed).integers(1, 40, size=len(case.texts[0]))
        yield in_steps(engine, case.texts[0], seq, sizes.tolist())


def neighbours(engine: Engine, case: Case) -> Iterator[Piece]:
    """All texts at once, unequal shares of each batch, tokens of sequences mixed."""
    rng = np.random.default_rng(9)
    texts = dict(zip((2, 0, 3, 1), case.texts, strict=True))
    done = dict.fromkeys(texts, 0)
    parts: dict[int, list[npt.NDArray[np.float32]]] = {seq: [] for seq in texts}
    while any(done[seq] < len(text) for seq, text in texts.items()):
        now = {}
        for seq, text in texts.items():
            end = min(done[seq] + int(rng.integers(0, 31)), len(text))
            if end > done[seq]:
                now[seq] = (text, done[seq], end)
                done[seq] = end
        if not now:
            continue
        owners = np.repeat(list(now), [b - a for _, a, b in now.values()])
        slots = mixed_order(owners, rng)
        logits = engine.decode(batch(now, slots))
        for seq in now:
            parts[seq].append(logits[owners[slots] == seq])
    for number, seq in enumerate(texts):
        rows = live_rows(engine, seq)
        yield Piece(text=number, start=0, logits=np.concatenate(parts[seq]), rows=rows)


def mixed_order(
    owners: npt.NDArray[np.int64], rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """An order of batch rows that mixes sequences and keeps each one's own order."""
    slots = np.empty(len(owners), np.int64)
    places = rng.permutation(owners)
    for seq in np.unique(owners):
        slots[places == seq] = np.flatnonzero(owners == seq)
    return slots


def buckets(engine: Engine, case: Case) -> Iterator[Piece]:
    """The end of a stretch of S texts through each size of the ladder, and no other size."""
    ladder = engine.manifest.ladder
    unit = engine.manifest.planners.context_unit
    for number, (streams, step, context) in enumerate(ladder.sizes()):
        ends = [min(len(text), context * unit) for text in case.texts[:streams]]
        count = min(step - (step > 1 and number % 2), *ends)
        engine.clear()
        for seq, end in enumerate(ends):
            if end > count:
                before = batch({seq: (case.texts[seq], 0, end - count)})
                engine.decode(before)
        only = BucketLadder(streams=(streams,), steps=(step,), contexts=(context,))
        use_ladder(engine, only)
        now = {seq: (case.texts[seq], end - count, end) for seq, end in enumerate(ends)}
        logits = engine.decode(batch(now)).reshape(streams, count, -1)
        use_ladder(engine, ladder)
        used = {(b.streams, b.step, b.context) for b in engine._graph.calls}
        assert (streams, step, context) in used
        for seq, end in enumerate(ends):
            yield Piece(text=seq, start=end - count, logits=logits[seq])


def use_ladder(engine: Engine, ladder: BucketLadder) -> None:
    """What splits a batch and what picks its buckets."""
    engine.manifest = engine.manifest.model_copy(update={"ladder": ladder})
    engine._steps._manifest = engine.manifest


PLAY = {
    "whole": whole,
    "single": single,
    "random": random,
    "neighbours": neighbours,
    "buckets": buckets,
}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.title)
def test_logits_and_rows(
    bundles: Bundles, case: Case, run: Run, measured: dict[tuple[str, str], str]
) -> None:
    """To transformers 1e-4; to a cold run of the same bundle 1e-5, logits and live cache rows."""
    with engine_of(bundles, case, run) as engine:
        first = cold(engine, case)
        to_oracle = {"cold": farthest(first, case)}
        to_cold = {}
        for split in run.splits:
            poison(engine)
            pieces = list(PLAY[split](engine, case))
            to_oracle[split] = farthest(pieces, case)
            to_cold[split] = apart(pieces, first)
        to_twin = largest_difference(first[0].rows or {}, the_twins(engine, case))
        sizes = {(b.streams, b.step, b.context) for b in engine._graph.calls}
    assert max(to_oracle.values()) <= TO_ORACLE, to_oracle
    assert max(to_cold.values()) <= TO_COLD, to_cold
    assert to_twin <= TO_ORACLE
    title = next(n for n in CONFIGS if case.folder == bundles.checkpoint(n))
    measured[title, run.title] = (
        f"{max(to_oracle.values()):.0e} {max(to_cold.values()):.0e} {len(sizes):2d}"
    )


def the_twins(engine: Engine, case: Case) -> Rows:
    return twin_rows(engine.manifest, case.texts[0].twin)


def farthest(pieces: Sequence[Piece], case: Case) -> float:
    """Greatest distance of logits to transformers."""
    wanted = [case.texts[p.text].logits[p.start : p.start + len(p.logits)] for p in pieces]
    return max(float(np.abs(p.logits - w).max()) for p, w in zip(pieces, wanted, strict=True))


def apart(pieces: Sequence[Piece], first: Sequence[Piece]) -> float:
    """Greatest distance of logits and live rows to the cold run."""
    worst = 0.0
    for piece in pieces:
        base = first[piece.text]
        wanted = base.logits[piece.start : piece.start + len(piece.logits)]
        worst = max(worst, float(np.abs(piece.logits - wanted).max()))
        if piece.rows is not None and base.rows is not None:
            worst = max(worst, largest_difference(piece.rows, base.rows))
    return worst


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str], str]:
    """Figures by config and run, for the table."""
    return {}


def test_pairs(
    measured: dict[tuple[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every config meets every value of every option; the table says in which run."""
    assert {split for run in RUNS for split in run.splits} == set(SPLITS)
    levels = {run.level for run in RUNS}
    assert levels == {"disable", "basic", "extended", "layout", "all"}
    for option, kind in (
        ("dialect", Dialect),
        ("gather", RowRead),
        ("scatter", RowWrite),
        ("select", Select),
        ("experts", Experts),
    ):
        assert {run.choices[option] for run in RUNS} == set(kind), option
    with capsys.disabled():
        print("\n\nmax logit difference to transformers, max difference to cold, bucket sizes")
        print(
            f"{'run':16} {'options':38} {'splits':40} " + " ".join(f"{n:>14}" for n in CONFIGS)
        )
        for run in RUNS:
            options = " ".join(str(run.choices[k]) for k in ("dialect", *DEFAULTS))
            cells = " ".join(f"{measured.get((n, run.title), '-'):>14}" for n in CONFIGS)
            print(f"{run.title:16} {options:38} {' '.join(run.splits):40} {cells}")
