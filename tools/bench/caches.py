"""What the cache types of the shipped model save and cost: bytes, and perplexity on held-out text.

The text is the standard library's, of files that the model was not trained on. Bytes of a published
model's caches follow from its contract alone.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.cache_types import CacheType, CacheTypes
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, Contract
from cachegraph.models.deepseek_v4.contract import contract
from cachegraph.models.deepseek_v4.presets import preset_config
from cachegraph.runtime import Batch, Engine

MODEL = "tiny:deepseek_v4"
PUBLISHED, PUBLISHED_CONTEXT = "deepseek-v4-flash", 131_072
HELD_OUT = ("difflib.py", "gzip.py", "enum.py", "multiprocessing/connection.py")
WINDOW = 768
MIB = 2**20
_F32, _F16, _BF16, _Q8 = CacheType
CHOICES = tuple(
    CacheTypes(rows=rows, index=index)
    for rows, index in (
        (_F32, _F32),
        (_F16, _F16),
        (_BF16, _BF16),
        (_Q8, _Q8),
        (_Q8, _F16),
        (_F32, _Q8),
    )
)

Logits = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFigure:
    """One choice: bytes by group of the shipped model, of the published one, and its answers."""

    types: CacheTypes
    rows_bytes: int
    index_bytes: int
    state_bytes: int
    published_bytes: int
    perplexity: float
    divergence: float  # mean KL from the f32 caches, in nats

    @property
    def total_bytes(self) -> int:
        """All caches of the shipped model."""
        return self.rows_bytes + self.index_bytes + self.state_bytes


def measure(
    work: Path,
    choices: Sequence[CacheTypes],
    report: Callable[[str], None],
    *,
    threads: int = 1,
    device: str = "cpu",
) -> list[CacheFigure]:
    """Export and run the shipped model with each choice; the first is what others are held to."""
    figures: list[CacheFigure] = []
    plain: Logits | None = None
    for types in choices:
        report(f"caches: {types.rows.value} rows, {types.index.value} index keys")
        bundle = _bundle(work, types)
        with Engine.load(bundle, device=device, threads=threads) as engine:
            texts = held_out(engine)
            logits = _teacher_forced(engine, texts)
            plain = logits if plain is None else plain
            figures.append(_figure(types, engine.manifest.contract, texts, logits, plain))
    return figures


def cache_table(figures: Sequence[CacheFigure]) -> list[str]:
    """A Markdown table."""
    lines = [
        f"4 sequences of {WINDOW} held-out tokens each, f32 weights, context {WINDOW}. "
        f"Flash: the caches of {PUBLISHED}, one sequence of {PUBLISHED_CONTEXT:,} tokens.",
        "",
        "| --cache | --index-cache | raw, CSA, HCA | LID | states | total | Flash | perplexity "
        "| to f32 | mean KL |",
        "| --- " * 10 + "|",
    ]
    base = figures[0].perplexity
    for f in figures:
        sizes = (f.rows_bytes, f.index_bytes, f.state_bytes, f.total_bytes)
        cells = [f.types.rows.value, f.types.index.value]
        cells += [f"{size / MIB:.2f} MiB" for size in sizes]
        cells += [f"{f.published_bytes / MIB:.0f} MiB", f"{f.perplexity:.3f}"]
        cells += [f"{f.perplexity / base - 1:+.2%}", f"{f.divergence:.5f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _bundle(work: Path, types: CacheTypes) -> Path:
    from cachegraph.graphgen import ExportOptions, export

    options = ExportOptions(
        cache=types.rows,
        index_cache=types.index,
        capacity=Capacity(context=WINDOW, sequences=len(HELD_OUT)),
    )
    out = work / f"caches_{types.rows.value}_{types.index.value}"
    return export(MODEL, out, options, static=[], overwrite=True)


def held_out(engine: Engine) -> NDArray[np.int64]:
    """[files, WINDOW] token ids, each row from the beginning of sequence on."""
    assert engine.codec is not None
    library = Path(sysconfig.get_paths()["stdlib"])
    bos = engine.manifest.bos_token_id
    rows = []
    for name in HELD_OUT:
        ids = engine.codec.encode((library / name).read_text(encoding="utf-8"))
        rows.append([bos, *(ids[1:] if ids[0] == bos else ids)][:WINDOW])
    return np.array(rows, np.int64)


def _teacher_forced(engine: Engine, texts: NDArray[np.int64]) -> Logits:
    """[files, WINDOW, vocab]."""
    files, count = texts.shape
    positions, owners = np.tile(np.arange(count), files), np.repeat(np.arange(files), count)
    batch = Batch.of(texts.ravel(), positions, owners.tolist(), logits=True)
    return engine.decode(batch).reshape(files, count, -1)


def _figure(
    types: CacheTypes,
    ours: Contract,
    texts: NDArray[np.int64],
    logits: Logits,
    plain: Logits,
) -> CacheFigure:
    by_kind = {
        kind: sum(spec.num_bytes for spec in ours.caches if spec.kind is kind)
        for kind in CacheKind
    }
    states = sum(size for kind, size in by_kind.items() if kind.is_state)
    published = contract(preset_config(PUBLISHED), Capacity(context=PUBLISHED_CONTEXT), types)
    p, q = _log_softmax(plain), _log_softmax(logits)
    wanted = np.take_along_axis(q[:, :-1], texts[:, 1:, None], axis=2)
    return CacheFigure(
        types=types,
        rows_bytes=sum(by_kind.values()) - states - by_kind[CacheKind.LID],
        index_bytes=by_kind[CacheKind.LID],
        state_bytes=states,
        published_bytes=sum(spec.num_bytes for spec in published.caches),
        perplexity=float(np.exp(-wanted.mean())),
        divergence=float((np.exp(p) * (p - q)).sum(axis=-1).mean()),
    )


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = logits - logits.max(axis=-1, keepdims=True).astype(float)
    normed: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normed
