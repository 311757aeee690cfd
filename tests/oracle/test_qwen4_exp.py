"""Whole tiny Qwen4-Exp models in the engine against transformers and the float64 twin.

Three random configs, each exported in every dialect and selection; texts with ends inside, and with
an image's positions; any split, four sequences, rewinds, copies and restores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.bundles import open_engine
from support.oracle import oracle_logits, published_weights
from support.qwen4_exp import CONFIGS, image_positions, random_checkpoint

from cachegraph.graphgen import ExportOptions, export
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, RowSharing
from cachegraph.models.export_options import Dialect, RowRead, RowWrite, Select
from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig
from cachegraph.models.qwen4_exp.parse import load_config
from cachegraph.models.qwen4_exp.twin import AttentionRun, TwinRun, forward
from cachegraph.runtime import Batch, Engine

pytestmark = pytest.mark.r3

Logits = NDArray[np.float32]
TO_ORACLE = 1e-4  # float32 logits of order 1, between frameworks
TO_COLD = 1e-5  # float noise of one bundle
CLIFF = 1e-5  # a chosen set that is cut closer may differ
LENGTH = 70
TEXTS = 4
CAPACITY = Capacity(context=80, sequences=TEXTS, max_step=32, rewind=4)
IMAGE = image_positions(before=11, height=3, width=4, after=LENGTH - 23)
VARIANTS = {
    "portable": ExportOptions(capacity=CAPACITY),
    "ort": ExportOptions(capacity=CAPACITY, dialect=Dialect.ORT),
    "mask": ExportOptions(
        capacity=CAPACITY,
        select=Select.MASK,
        gather=RowRead.ND,
        scatter=RowWrite.ELEMENTS,
        raw=RowSharing.UNIFIED,
    ),
    "ort-mask": ExportOptions(
        capacity=CAPACITY, dialect=Dialect.ORT, select=Select.MASK, raw=RowSharing.UNIFIED
    ),
}
SPLITS = {
    "whole": [LENGTH],
    "single": [1] * LENGTH,
    "odd": [5, 1, 9, 2, 30, 4, 19],
    "image": [11, 1, 2, 6, 30, 20],  # edges inside the image
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Tokens [n], positions [n, 3], transformers' logits [n, vocab], the twin's states."""

    tokens: Sequence[int]
    positions: NDArray[np.int64]
    logits: Logits
    run: TwinRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A checkpoint, its texts, of which the last has an image's positions."""

    folder: Path
    config: Qwen4ExpConfig
    texts: tuple[Text, ...]


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = random_checkpoint(tmp_path_factory.mktemp("model"), seed=1, name=request.param)
    config = load_config(folder)
    plain = np.repeat(np.arange(LENGTH)[:, None], 3, axis=1)
    seeds = iter(range(100))
    texts = tuple(
        draw(folder, config, seeds, IMAGE if number == TEXTS - 1 else plain)
        for number in range(TEXTS)
    )
    return Model(folder=folder, config=config, texts=texts)


def draw(
    folder: Path, config: Qwen4ExpConfig, seeds: Iterator[int], positions: NDArray[np.int64]
) -> Text:
    """The next seeded text, with ends inside, whose narrowest cut is no cliff."""
    for seed in seeds:
        tokens = np.random.default_rng(seed).integers(config.vocab_size, size=LENGTH)
        tokens[[13, 27, 28]] = config.ngram_end
        run = forward(config, published_weights(folder), tokens, positions)
        if run.smallest_gap >= CLIFF:
            logits = oracle_logits(folder, tokens.tolist(), positions)
            return Text(tokens=tokens.tolist(), positions=positions, logits=logits, run=run)
    pytest.fail(f"no seed gives {folder.name} a text without a near tie")


@pytest.fixture(scope="module", params=VARIANTS)
def engine(
    model: Model, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    out = tmp_path_factory.mktemp("bundle") / request.param
    export(model.folder, out, VARIANTS[request.param], static=[])
    with open_engine(out) as opened:
        yield opened


def feed(engine: Engine, text: Text, seq: int, start: int, end: int) -> Logits:
    """Logits of tokens start .. end - 1 of a text in a sequence."""
    span = slice(start, end)
    batch = Batch.of(
        text.tokens[span], text.positions[span], [seq] * (end - start), logits=True
    )
    return engine.decode(batch)


def close(ours: Logits, theirs: Logits, bound: float = TO_ORACLE) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_agrees(model: Model, engine: Engine, split: str) -> None:
    """Text and image alike; the three positions of a token come with it."""
    for text in (model.texts[0], model.texts[-1]):
        engine.clear(0)
        edges = np.cumsum([0, *SPLITS[split]])
        parts = [feed(engine, text, 0, start, end) for start, end in pairwise(edges)]
        close(np.concatenate(parts), text.logits)


def test_four_sequences_in_one_batch_agree(model: Model, engine: Engine) -> None:
    """Of unequal lengths, then one token each, then of other lengths."""
    engine.clear()
    done = [0] * TEXTS
    for counts in ([33, 7, 18, 25], [1] * TEXTS, [2, 30, 1, 20]):
        spans = [slice(a, a + n) for a, n in zip(done, counts, strict=True)]
        texts = list(zip(model.texts, spans, strict=True))
        batch = Batch.of(
            np.concatenate([text.tokens[span] for text, span in texts]),
            np.concatenate([text.positions[span] for text, span in texts]),
            np.repeat(np.arange(TEXTS), counts).tolist(),
            logits=True,
        )
        wanted = np.concatenate([text.logits[span] for text, span in texts])
        close(engine.decode(batch), wanted)
        done = [span.stop for span in spans]


def test_a_rewind_goes_on_as_if_never_longer(model: Model, engine: Engine) -> None:
    """Into the image too, by number of tokens; a rejected text leaves nothing behind."""
    for text, place in ((model.texts[0], 41), (model.texts[-1], 17)):
        engine.clear(1)
        feed(engine, text, 1, 0, place)
        junk = [(t + 1) % model.config.vocab_size for t in text.tokens[place : place + 4]]
        batch = Batch.of(junk, text.positions[place : place + 4], [1] * 4, logits=True)
        engine.decode(batch)
        engine.rewind(1, place)
        close(feed(engine, text, 1, place, LENGTH), text.logits[place:])


def test_a_fork_goes_on_on_both_sides(model: Model, engine: Engine) -> None:
    """Source and target with texts of their own; what the target held is gone."""
    text, other = model.texts[0], model.texts[1]
    engine.clear()
    feed(engine, other, 3, 0, 21)
    feed(engine, text, 2, 0, 38)
    engine.copy(2, 3)
    close(feed(engine, text, 2, 38, 55), text.logits[38:55])
    close(feed(engine, text, 3, 38, LENGTH), text.logits[38:])
    engine.rewind(3, LENGTH - 3)
    close(feed(engine, text, 3, LENGTH - 3, LENGTH), text.logits[LENGTH - 3 :])
    close(feed(engine, text, 2, 55, LENGTH), text.logits[55:])


def test_a_saved_sequence_goes_on_in_another_slot(
    model: Model, engine: Engine, tmp_path: Path
) -> None:
    """With its image, its snapshots and its n-gram history."""
    text = model.texts[-1]
    engine.clear()
    feed(engine, text, 0, 0, 40)
    engine.save(tmp_path / "state")
    engine.clear(data=True)
    engine.restore(tmp_path / "state", {0: 2})
    engine.rewind(2, 37)
    close(feed(engine, text, 2, 37, LENGTH), text.logits[37:])


def test_caches_hold_what_the_twin_holds(model: Model, engine: Engine) -> None:
    """Keys, values, raw and pooled indexer keys, matrices and histories of every layer."""
    text = model.texts[-1]
    engine.clear()
    feed(engine, text, 1, 0, 44)
    feed(engine, text, 1, 44, LENGTH)
    memory = engine._store.table
    rows = memory.stored(1).rows
    pools = memory._layouts[1].reps
    held = {
        name: buffer.array.reshape(buffer.array.shape[0], -1)
        for name, buffer in engine._store.caches.items()
    }
    for layer, run in enumerate(text.run.layers):
        if isinstance(run.mixer, AttentionRun):
            wanted = {
                CacheKind.KEYS: (rows[CacheKind.KEYS], run.mixer.keys),
                CacheKind.VALUES: (rows[CacheKind.VALUES], run.mixer.values),
                CacheKind.INDEX: (rows[CacheKind.INDEX], run.mixer.index_keys),
                CacheKind.POOLED: (pools, run.mixer.pooled),
            }
        else:
            last = rows[CacheKind.RECURRENT_STATE][-1:]
            wanted = {
                CacheKind.CONV_STATE: (last, run.mixer.history(model.config, LENGTH)),
                CacheKind.RECURRENT_STATE: (last, run.mixer.states[-1]),
            }
        if run.ngram is not None:
            last = rows[CacheKind.NGRAM_STATE][-1:]
            wanted[CacheKind.NGRAM_STATE] = (last, run.ngram.history(model.config, LENGTH))
        for kind, (places, values) in wanted.items():
            ours = held[f"cache.{layer}.{kind.value}"][places]
            np.testing.assert_allclose(
                ours, values.reshape(ours.shape), rtol=0, atol=2e-5, err_msg=f"{layer} {kind}"
            )
