"""A fake engine that drafts: each row of logits is fixed by the tokens before it.

Keeps the rules that a real one lives by: positions are consecutive, no more is taken back than the
budget, nothing beyond the context is held or drafted for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cachegraph.runtime.batch import Batch

EOS = 7


class DraftEngine:
    """right: the share of drafts, fixed by what is before them, whose row is the model's own."""

    def __init__(
        self,
        *,
        right: float,
        sequences: int = 3,
        vocab: int = 19,
        context: int = 40,
        rewind: int = 5,
        scale: float = 2.0,
    ) -> None:
        capacity = SimpleNamespace(context=context, rewind=rewind)
        self.manifest: Any = SimpleNamespace(
            capacity=capacity, eos_token_ids=(EOS,), vocab_size=vocab
        )
        self.num_sequences = sequences
        self.can_draft = True
        self.held: dict[int, list[int]] = {seq: [] for seq in range(sequences)}
        self.batches: list[Batch] = []
        self.drafted: list[dict[int, list[int]]] = []
        self.removed: list[int] = []
        self._furthest = dict.fromkeys(range(sequences), 0)
        self._right = right
        self._scale = scale

    def length(self, seq_id: int) -> int:
        return len(self.held[seq_id])

    def clear(self, seq_id: int | None = None) -> None:
        for seq in self.held if seq_id is None else [seq_id]:
            self.held[seq] = []
            self._furthest[seq] = 0

    def remove(self, seq_id: int, first: int, end: int = -1) -> None:
        assert 0 < first < self.length(seq_id)
        assert self._furthest[seq_id] - first <= self.manifest.capacity.rewind
        self.removed.append(self.length(seq_id) - first)
        del self.held[seq_id][first:]

    def decode(self, batch: Batch, progress: Any = None) -> np.ndarray:
        self.batches.append(batch)
        rows = [np.empty((0, self.manifest.vocab_size), np.float32)]
        owners = [ids[0] for ids in batch.seq_ids]
        columns = (batch.tokens, batch.positions, owners, batch.wants_logits)
        for token, position, seq, is_wanted in zip(*columns, strict=True):
            assert position == self.length(seq) < self.manifest.capacity.context
            self.held[seq].append(int(token))
            self._furthest[seq] = max(self._furthest[seq], self.length(seq))
            if is_wanted:
                rows.append(self.row(self.held[seq])[None])
        return np.concatenate(rows)

    def draft(
        self,
        pending: Mapping[int, int],
        count: int | Mapping[int, int],
        choose: Callable[[int, np.ndarray], int],
    ) -> dict[int, list[int]]:
        counts = dict.fromkeys(pending, count) if isinstance(count, int) else count
        assert counts.keys() == pending.keys()
        drafts: dict[int, list[int]] = {seq: [] for seq in pending}
        for step in range(max(counts.values())):  # sequences take turns, as in a batch
            for seq in (seq for seq in pending if step < counts[seq]):
                before = [*self.held[seq], pending[seq], *drafts[seq]]
                assert len(before) < self.manifest.capacity.context
                drafts[seq].append(choose(seq, self._draft_row(before)))
        self.drafted.append(drafts)
        return drafts

    def row(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits behind these tokens: none is equal to another."""
        rng = np.random.default_rng(tokens)
        row = rng.normal(0, self._scale, self.manifest.vocab_size)
        return row.astype(np.float32)

    def _draft_row(self, tokens: Sequence[int]) -> np.ndarray:
        row = self.row(tokens)
        if np.random.default_rng([1, *tokens]).random() < self._right:
            return row
        return np.roll(row, 1)
