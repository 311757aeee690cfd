"""How often the draft block says what the main model would have said. Counts, no training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachegraph.tools.dev.tiny.draft_block import DraftBlock, run_main, unroll

Marks = NDArray[np.bool_]


@torch.no_grad()
def equal_on_text(block: DraftBlock, model: Any, texts: Tensor, drafts: int) -> Marks:
    """Which drafts equal the model's likeliest token, given the text's own tokens before.

    texts [B, T]; the result is [B, T-drafts, drafts], by the pair at which a chain starts.
    """
    logits, streams = run_main(model, texts)
    chains = texts.shape[1] - drafts
    guessed = unroll(block, model, texts, streams, drafts)
    marks = [
        logits[:, 1 + i : 1 + i + chains].argmax(-1) == one[:, :chains].argmax(-1)
        for i, one in enumerate(guessed)
    ]
    return torch.stack(marks, dim=-1).numpy()


def accepted_in_steps(equal: Marks, first: int) -> list[int]:
    """Drafts that each step of speculative decoding accepts, over one greedy text.

    equal [chains, drafts] of that text; the first step starts at chain `first`. A step accepts
    the drafts before the first wrong one and adds the model's own token.
    """
    accepted, chain = [], first
    while chain < len(equal):
        count = int(equal[chain].cumprod().sum())
        accepted.append(count)
        chain += count + 1
    return accepted
