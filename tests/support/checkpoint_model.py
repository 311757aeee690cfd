"""Checkpoints in the dictionary model: what each mode copies, and what an accept must answer.

Shares no code with `runtime/checkpoints.py`: where a sequence may stand is read off the labels of
the rows that lie there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from support.sequence_model import Label, Memory

from cachegraph.models.contract import CacheKind

Rings = dict[tuple[CacheKind, int], Label]


@dataclass
class Saved:
    """One sequence since the save. tokens: all since, rejected ones last."""

    base: Label
    rings: Rings
    tokens: list[int] = field(default_factory=list)
    standing: int = 0
    is_void: bool = False


class CheckpointModel:
    """The checkpoint of all sequences; `memory` and `texts` are those of the books."""

    def __init__(self, memory: Memory, texts: list[Label], rewind: int) -> None:
        self.mode, self.max_tokens = "ring", rewind
        self.saved: dict[int, Saved] = {}
        self._memory, self._texts = memory, texts

    def prepare(self, mode: str, max_tokens: int) -> None:
        self.max_tokens = max(max_tokens, self.max_tokens if mode == self.mode else 0)
        self.mode = mode

    def save(self) -> None:
        self.saved = {s: Saved(text, self._rings(s)) for s, text in enumerate(self._texts)}

    def void(self, seq: int) -> None:
        if self.saved:
            self.saved[seq].is_void = True

    def note(self, seq: int, tokens: Sequence[int]) -> None:
        """A decode gave a sequence these tokens; rejected ones are forgotten."""
        if self.saved:
            saved = self.saved[seq]
            saved.tokens[saved.standing :] = tokens
            saved.standing = len(saved.tokens)
            saved.is_void |= self.mode == "delta" and saved.standing > self.max_tokens

    def accept(self, seq: int, count: int) -> str:
        """The answer, or an empty one for a refusal that changes nothing."""
        saved = self.saved.get(seq)
        if saved is None or saved.is_void or count > len(saved.tokens):
            return ""
        if count == saved.standing:
            return "direct"
        kept = count if self.mode in ("ring", "delta") else 0
        text = saved.base + tuple(saved.tokens[:kept])
        before = self._rings(seq)
        if self.mode != "ring":
            self._put(seq, saved.rings)
            for _, state, *_ in self._memory.compressors:
                for end in range(len(saved.base) + 1, len(text) + 1):
                    row = self._memory.row(state, seq, end - 1)
                    self._memory.rows[state][row] = text[:end]
        if not self._memory.is_safe(seq, text, len(text)):
            self._put(seq, before)
            return ""
        self._texts[seq] = text
        saved.standing = kept
        return "direct" if kept == count else f"replay from {len(saved.base)}"

    def _rings(self, seq: int) -> Rings:
        """Every state row of a sequence that was written."""
        rings = {}
        for _, state, *_ in self._memory.compressors:
            for index in range(self._memory.sizes[state]):
                label = self._memory.rows[state].get(self._memory.row(state, seq, index))
                if label is not None:
                    rings[state, index] = label
        return rings

    def _put(self, seq: int, rings: Rings) -> None:
        for _, state, *_ in self._memory.compressors:
            for index in range(self._memory.sizes[state]):
                self._memory.rows[state].pop(self._memory.row(state, seq, index), None)
        for (state, index), label in rings.items():
            self._memory.rows[state][self._memory.row(state, seq, index)] = label
