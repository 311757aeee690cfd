"""Measure a tiny checkpoint over whole held-out files, and what its block selection is worth.

Prints Markdown tables: bits per byte of the model beside a byte 5-gram model trained on the
same files, then of the model under other selections. Needs the test extra (torch,
transformers). See docs/tiny_model.md.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from cachegraph.tools.dev.tiny import ngram
from cachegraph.tools.dev.tiny.corpus import Corpus, stdlib_corpus
from cachegraph.tools.dev.tiny.network import load_model
from cachegraph.tools.dev.tiny.scoring import FileScore, bits_per_byte, score_file
from cachegraph.tools.dev.tiny.selection import Selection, selecting
from cachegraph.tools.dev.tiny.tokens import encode_file, load_tokenizer, token_bytes

SIZE, STRIDE = 1024, 512
SPANS = ((1, 64), (65, 256), (257, 512), (513, 1024))  # tokens of context, both included

Scorer = Callable[[Selection, int], list[FileScore]]


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="draws of random selection; 0 leaves the other selections out",
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    corpus = stdlib_corpus()
    score = _scorer(args.checkpoint, corpus)
    print(_versions(), flush=True)
    learned = score(Selection.LEARNED, 0)
    _print_yardstick(corpus, learned)
    if args.seeds:
        _print_selections(learned, args.seeds, score)


def _scorer(checkpoint: Path, corpus: Corpus) -> Scorer:
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    sizes = token_bytes(tokenizer)
    files = [(s.name, encode_file(tokenizer, s.text)) for s in corpus.held_out]

    def score(selection: Selection, seed: int) -> list[FileScore]:
        with selecting(model, selection, seed):
            return [
                score_file(model, name, ids, sizes, size=SIZE, stride=STRIDE)
                for name, ids in files
            ]

    return score


def _versions() -> str:
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}\n"
    )


def _print_yardstick(corpus: Corpus, learned: list[FileScore]) -> None:
    five = ngram.train((s.data for s in corpus.train), order=5)
    bits = [five.bits(s.data) for s in corpus.held_out]
    _row("file", "bytes", "5-gram", "model")
    _row(*["---"] * 4)
    for source, file_bits, score in zip(corpus.held_out, bits, learned, strict=True):
        size = len(source.data)
        assert size == int(score.sizes.sum())  # both sides are scored on the same bytes
        _row(source.name, size, file_bits / size, bits_per_byte([score]))
    total = sum(len(s.data) for s in corpus.held_out)
    _row("all", total, sum(bits) / total, bits_per_byte(learned))
    print()


def _print_selections(learned: list[FileScore], seeds: int, score: Scorer) -> None:
    """Bits per byte of each selection, as a whole and by tokens of context."""
    spans = [f"{low}-{high}" for low, high in SPANS]
    _row("selection", "all", *spans, "against learned", "files that get worse")
    _row(*["---"] * (len(SPANS) + 4))
    _print_selection("learned", learned, learned)
    for seed in range(seeds):
        _print_selection(f"random, seed {seed}", score(Selection.RANDOM, seed), learned)
    for selection in (Selection.RECENT, Selection.ALL, Selection.NONE):
        _print_selection(selection.value, score(selection, 0), learned)


def _print_selection(name: str, scores: list[FileScore], learned: list[FileScore]) -> None:
    total, base = bits_per_byte(scores), bits_per_byte(learned)
    spans = [bits_per_byte(scores, _context(low, high)) for low, high in SPANS]
    pairs = zip(scores, learned, strict=True)
    worse = sum(bits_per_byte([mine]) > bits_per_byte([theirs]) for mine, theirs in pairs)
    _row(name, total, *spans, f"{100 * (total / base - 1):+.2f}%", f"{worse} of {len(scores)}")


def _context(low: int, high: int) -> Callable[[FileScore], NDArray[np.bool_]]:
    return lambda score: (low <= score.seen) & (score.seen <= high)


def _row(*cells: object) -> None:
    texts: Iterable[str] = (f"{c:.4f}" if isinstance(c, float) else str(c) for c in cells)
    print("| " + " | ".join(texts) + " |", flush=True)


if __name__ == "__main__":
    main()
