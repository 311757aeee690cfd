"""What drafting with the shipped model's MTP block gains: tokens a step, tokens a second.

Greedy continuations of prompts from files that it was not trained on, one sequence at a time.
Every draft length is measured in turn inside one repetition, so that noise meets them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

from cachegraph.models.capacity import Capacity
from cachegraph.models.export_options import Dialect, ExportOptions, WeightType
from cachegraph.runtime import Engine, GenerateOptions
from cachegraph.tools.bench.caches import MODEL, held_out

DRAFTS = (0, 1, 2, 3, 4, 5)
PROMPT, STARTS, NEW_TOKENS = 48, (0, 320), 128


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftFigure:
    """One draft length. equal: share of tokens equal to those without drafting, by place."""

    weights: WeightType
    draft: int
    drafted: int
    accepted: int
    steps: int
    per_second: float
    equal: float


def measure_drafting(
    work: Path,
    weights: Sequence[WeightType],
    report: Callable[[str], None],
    *,
    drafts: Sequence[int] = DRAFTS,
    new_tokens: int = NEW_TOKENS,
    repeats: int = 5,
    threads: int = 1,
    device: str = "cpu",
) -> list[DraftFigure]:
    """Export the shipped model with each weight form and generate; `drafts` begins with 0."""
    from cachegraph.graphgen import export

    figures = []
    for form in weights:
        report(f"drafting: {form.value}")
        options = ExportOptions(
            dialect=Dialect.ORT, weights=form, capacity=Capacity(context=512)
        )
        bundle = export(
            MODEL, work / f"draft_{form.value}", options, static=[], overwrite=True
        )
        with Engine.load(bundle, device=device, threads=threads, draft=True) as engine:
            figures += _figures(engine, form, drafts, new_tokens, repeats)
    return figures


def draft_table(figures: Sequence[DraftFigure]) -> list[str]:
    """A Markdown table; ratios are to the same weights without drafting."""
    lines = [
        f"Greedy, {NEW_TOKENS} tokens after each of {len(STARTS) * 4} prompts of {PROMPT} held-out "
        "tokens, ort dialect, one sequence at a time. Accepted: share of the drafts. Tokens a "
        "step: of the main graph. Equal: share of tokens that are those of the text without "
        "drafting.",
        "",
        "| weights | --draft | accepted | tokens a step | tokens/s | ratio | equal |",
        "| --- " * 7 + "|",
    ]
    plain = {figure.weights: figure for figure in figures if not figure.draft}
    for f in figures:
        accepted = f"{f.accepted / f.drafted:.1%}" if f.drafted else "-"
        cells = [f.weights.value, str(f.draft), accepted, f"{1 + f.accepted / f.steps:.2f}"]
        cells += [f"{f.per_second:.0f}", f"{f.per_second / plain[f.weights].per_second:.2f}"]
        cells.append(f"{f.equal:.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _figures(
    engine: Engine, form: WeightType, drafts: Sequence[int], new_tokens: int, repeats: int
) -> list[DraftFigure]:
    texts = held_out(engine).tolist()
    prompts = [text[start : start + PROMPT] for text, start in product(texts, STARTS)]
    seconds: dict[int, list[float]] = {draft: [] for draft in drafts}
    runs: dict[int, tuple[list[list[int]], list[int]]] = {}
    for draft in drafts:  # buffers of every bucket are made before anything is timed
        _generate(engine, prompts[:1], draft, new_tokens)
    for _ in range(repeats):
        for draft in drafts:
            start = time.perf_counter()
            runs[draft] = _generate(engine, prompts, draft, new_tokens)
            seconds[draft].append(time.perf_counter() - start)
    plain = [token for text in runs[0][0] for token in text]
    figures = []
    for draft, (ids, counts) in runs.items():
        flat = [token for text in ids for token in text]
        same = sum(one == other for one, other in zip(flat, plain, strict=True))
        figures.append(
            DraftFigure(
                weights=form,
                draft=draft,
                drafted=counts[0],
                accepted=counts[1],
                steps=counts[2],
                per_second=len(flat) / median(seconds[draft]),
                equal=same / len(plain),
            )
        )
    return figures


def _generate(
    engine: Engine, prompts: Sequence[list[int]], draft: int, new_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """Token ids after each prompt, and drafted, accepted and steps over all of them."""
    options = GenerateOptions(max_tokens=new_tokens, draft=draft, ignore_eos=True)
    texts, counts = [], [0, 0, 0]
    for prompt in prompts:
        ids = []
        for event in engine.generate([prompt], options):
            ids.append(event.choice.token)
            if event.drafts is not None:
                found = (event.drafts.drafted, event.drafts.accepted, event.drafts.steps)
                counts = [one + more for one, more in zip(counts, found, strict=True)]
        texts.append(ids)
    if not draft:  # a token a step
        counts[2] = new_tokens * len(prompts)
    return texts, counts
