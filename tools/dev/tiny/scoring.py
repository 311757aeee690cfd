"""Bits per byte over whole files, in windows. BOS is context only, and there is no EOS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cachegraph.tools.dev.tiny.tokens import Ids
from cachegraph.tools.dev.tiny.windows import windows

Nats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileScore:
    """What each token of one file cost.

    `nats` of each, its `sizes` in bytes, and `seen`, the tokens of context it had; all [n].
    """

    name: str
    nats: Nats
    sizes: Ids
    seen: Ids


@torch.no_grad()
def score_file(
    model: nn.Module,
    name: str,
    ids: Ids,
    byte_sizes: Ids,
    *,
    size: int,
    stride: int,
) -> FileScore:
    """Run one file through the model window by window."""
    nats, seen = [], []
    for window in windows(len(ids), size=size, stride=stride):
        inputs = torch.from_numpy(ids[window.start : window.end])[None]
        logits = model(inputs, use_cache=False).logits[0, window.first - window.start - 1 :]
        targets = torch.from_numpy(ids[window.first : window.end + 1])
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        nats.append(losses.double().numpy())
        seen.append(np.arange(window.first, window.end + 1) - window.start)
    return FileScore(
        name=name,
        nats=np.concatenate(nats),
        sizes=byte_sizes[ids[1:]],
        seen=np.concatenate(seen),
    )


def bits_per_byte(
    scores: list[FileScore], keep: Callable[[FileScore], NDArray[np.bool_]] | None = None
) -> float:
    """Total bits over total bytes, of all tokens or of those that `keep` marks."""
    marks = [slice(None) if keep is None else keep(s) for s in scores]
    nats = sum(float(s.nats[m].sum()) for s, m in zip(scores, marks, strict=True))
    size = sum(int(s.sizes[m].sum()) for s, m in zip(scores, marks, strict=True))
    return nats / log(2) / size
