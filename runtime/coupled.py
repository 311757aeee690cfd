"""Coupled tokens: one token that belongs to several sequences.

Each sequence has rows of its own, so that such a token is decoded once for each of its sequences;
its logits are those of the first. That is one answer only if all its sequences hold the same text
before it, which is checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from cachegraph.models.errors import BatchError
from cachegraph.runtime.batch import Batch, IntArray


def decoupled(batch: Batch, text_of: Callable[[int], Sequence[Hashable]]) -> Batch:
    """The batch with every coupled token written out once for each of its sequences.

    text_of: the ids that a sequence holds, with their positions where tokens have three. BatchError
    names a coupled token whose sequences hold different histories. A batch without coupled tokens
    is returned as it is.
    """
    if all(len(owners) == 1 for owners in batch.seq_ids):
        return batch
    _check_histories(batch, text_of)
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


def _check_histories(batch: Batch, text_of: Callable[[int], Sequence[Hashable]]) -> None:
    """Compare running digests of each sequence's text, so that long prompts stay linear."""
    digests: dict[int, int] = {}
    tokens: list[Hashable] = batch.tokens.tolist()
    if batch.places is not None:
        tokens = placed_text(batch.tokens, batch.places)
    for row, (token, owners) in enumerate(zip(tokens, batch.seq_ids, strict=True)):
        for seq in owners:
            if seq not in digests:
                digests[seq] = _chain(0, text_of(seq))
        if len({digests[seq] for seq in owners}) > 1:
            raise BatchError(
                f"token {row}: coupled token of sequences {owners}, which hold different "
                "histories; decode it once for each sequence"
            )
        for seq in owners:
            digests[seq] = _chain(digests[seq], (token,))


def placed_text(tokens: ArrayLike, places: IntArray) -> list[Hashable]:
    """Tokens [n] with their positions [n, 3], to compare texts by."""
    return [tuple(row) for row in np.column_stack((tokens, places)).tolist()]


def _chain(digest: int, tokens: Sequence[Hashable]) -> int:
    for token in tokens:
        digest = hash((digest, token))
    return digest
