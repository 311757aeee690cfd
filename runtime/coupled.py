"""Coupled tokens: one token that belongs to several sequences.

Each sequence has rows of its own, so that such a token is decoded once for each of its sequences;
its logits are those of the first. That is one answer only if all its sequences hold the same text
before it, which is checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cachegraph.models.errors import BatchError
from cachegraph.runtime.batch import Batch


def decoupled(batch: Batch, tokens_of: Callable[[int], Sequence[int]]) -> Batch:
    """The batch with every coupled token written out once for each of its sequences.

    tokens_of: the ids that a sequence holds. BatchError names a coupled token whose sequences hold
    different histories. A batch without coupled tokens is returned as it is.
    """
    if all(len(owners) == 1 for owners in batch.seq_ids):
        return batch
    _check_histories(batch, tokens_of)
    rows = np.repeat(np.arange(len(batch)), [len(owners) for owners in batch.seq_ids])
    is_first = np.ones(rows.size, np.bool_)
    is_first[1:] = rows[1:] != rows[:-1]
    return Batch(
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        seq_ids=tuple((seq,) for owners in batch.seq_ids for seq in owners),
        wants_logits=batch.wants_logits[rows] & is_first,
        places=None if batch.places is None else batch.places[rows],
    )


def _check_histories(batch: Batch, tokens_of: Callable[[int], Sequence[int]]) -> None:
    """Compare running digests of each sequence's text, so that long prompts stay linear."""
    digests: dict[int, int] = {}
    for row, (token, owners) in enumerate(
        zip(batch.tokens.tolist(), batch.seq_ids, strict=True)
    ):
        for seq in owners:
            if seq not in digests:
                digests[seq] = _chain(0, tokens_of(seq))
        if len({digests[seq] for seq in owners}) > 1:
            raise BatchError(
                f"token {row}: coupled token of sequences {owners}, which hold different "
                "histories; decode it once for each sequence"
            )
        for seq in owners:
            digests[seq] = _chain(digests[seq], (token,))


def _chain(digest: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        digest = hash((digest, token))
    return digest
