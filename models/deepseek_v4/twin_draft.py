"""The naive twin of the MTP block: plain numpy float64, all pairs at once, no cache.

A pair is a token and the residual streams of the position before it. Positions enter by their
differences alone, so the first pair counts as position 0. Drafting further runs everything again
with the block's own streams behind it. The parts are those of `twin_parts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.twin import LayerRun, run_layer
from cachegraph.models.deepseek_v4.twin_parts import hyper_head
from cachegraph.models.twin_tools import Floats, Ids, Tensors, rms_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRun:
    """A run over T pairs: logits [T, vocab], the block's streams [T, M, D], its layer's record."""

    logits: Floats
    streams: Floats
    layer: LayerRun


def draft_forward(
    config: DeepseekV4Config,
    weights: Mapping[str, npt.NDArray[np.generic]],
    streams: Floats,
    tokens: Sequence[int] | Ids,
) -> DraftRun:
    """Run the block over T pairs of one sequence, from its first.

    streams [T, M, D]: row i is what the main model, or the block itself, left at the position
    before tokens[i]. weights: as the main twin's `forward`, with those under `mtp.0`.
    CheckpointError where one is missing.
    """
    tensors, eps = Tensors(weights), config.rms_norm_eps
    block = tensors.under("mtp.0")
    ids = np.asarray(tokens, dtype=np.int64)
    embedded = rms_norm(tensors.floats("embed.weight")[ids], eps, block.floats("enorm.weight"))
    before = rms_norm(streams, eps, block.floats("hnorm.weight"))
    token = block.linear(embedded, "e_proj")
    joined = token[:, None, :] + block.linear(before, "h_proj")  # [T, M, D]
    out, layer = run_layer(config.draft, block, 0, joined, ids)
    normed = rms_norm(hyper_head(config, block, out), eps, block.floats("norm.weight"))
    return DraftRun(logits=tensors.linear(normed, "head"), streams=out, layer=layer)


def draft_greedy(
    config: DeepseekV4Config,
    weights: Mapping[str, npt.NDArray[np.generic]],
    streams: Floats,
    tokens: Sequence[int] | Ids,
    steps: int,
) -> tuple[Ids, Floats]:
    """Draft greedily from the last of T pairs: tokens [steps] and their logits [steps, vocab]."""
    ids = np.asarray(tokens, dtype=np.int64)
    logits = []
    for _ in range(steps):
        run = draft_forward(config, weights, streams, ids)
        logits.append(run.logits[-1])
        ids = np.append(ids, logits[-1].argmax())
        streams = np.concatenate([streams, run.streams[-1:]])
    return ids[len(ids) - steps :], np.stack(logits)
