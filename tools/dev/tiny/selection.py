"""Other ways to select blocks, to see what the indexer's scores are worth.

Only the scorers' output or the top-k is replaced; attention, weights and visibility stay as
they are. Used for measuring, never by the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

import torch
from torch import Tensor, nn

from cachegraph.tools.dev.tiny.network import modules_named
from cachegraph.tools.dev.tiny.schedule import EVERYTHING


class Selection(StrEnum):
    """Which of the visible blocks a CSA layer attends to."""

    LEARNED = "learned"  # the indexer's top-k
    RANDOM = "random"  # k at random, drawn anew for every token and layer
    RECENT = "recent"  # the last k
    ALL = "all"  # every visible block: no selection
    NONE = "none"  # no block: the raw window alone


_TOPK = {Selection.ALL: EVERYTHING, Selection.NONE: 0}


@contextmanager
def selecting(model: nn.Module, selection: Selection, seed: int = 0) -> Iterator[None]:
    """Within the block, the model selects as told; afterwards it is as it was."""
    replace = _replacement(selection, torch.Generator().manual_seed(seed))
    indexers = [m for _, m in modules_named(model, "DeepseekV4Indexer")]
    before = [indexer.index_topk for indexer in indexers]
    hooks = [
        scorer.register_forward_hook(lambda _module, _args, scores: replace(scores))
        for _, scorer in modules_named(model, "DeepseekV4IndexerScorer")
    ]
    try:
        for indexer, topk in zip(indexers, before, strict=True):
            indexer.__dict__["index_topk"] = _TOPK.get(selection, topk)
        yield
    finally:
        for indexer, topk in zip(indexers, before, strict=True):
            indexer.__dict__["index_topk"] = topk
        for hook in hooks:
            hook.remove()


def _replacement(
    selection: Selection, generator: torch.Generator
) -> Callable[[Tensor], Tensor]:
    """Scores [B, T, N] -> scores [B, T, N]; blocks not yet visible are masked after it."""
    if selection is Selection.RANDOM:
        return lambda scores: torch.rand(scores.shape, generator=generator)
    if selection is Selection.RECENT:
        return lambda scores: torch.arange(scores.shape[-1]).float().expand(scores.shape)
    return lambda scores: scores
