"""The caches as dictionaries of labels: what a step's padded buffers mean.

A row holds ("token", sequence, position), a window of such labels, or a sentinel's name. `play`
does to it what the graph does with the buffers and checks, after each step, that every real token
sees exactly what it must. Shares no code with runtime/; knows contract names and layouts only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cachegraph.models.contract import CacheKind, Contract, RowLayout

Label = Any
Buffers = Mapping[str, np.ndarray]
POISON = -987_654_321


@dataclass(frozen=True, kw_only=True)
class Token:
    """A real token of the call and the row of T that it must sit at."""

    row: int
    seq: int
    pos: int
    token: int


@dataclass(kw_only=True)
class Compressor:
    """One compressor: its sizes, its ring rows and its compressed rows."""

    name: str
    ratio: int
    overlap: bool
    layout: RowLayout
    state_layout: RowLayout
    state: dict[int, Label] = field(default_factory=dict)
    rows: dict[int, Label] = field(default_factory=dict)


class PlanModel:
    """All caches of a contract, by label."""

    def __init__(
        self,
        contract: Contract,
        window: int,
        ratios: Mapping[str, tuple[int, bool]],
        pinned: int = 0,
    ):
        self.window, self.pinned = window, pinned
        self.raw_layout = contract.layout(CacheKind.RAW)
        self.raw: dict[int, Label] = {}
        self.compressors = []
        for name, (ratio, overlap) in ratios.items():
            layout = contract.layout(CacheKind(name))
            state = contract.layout(CacheKind(f"{name}_state"))
            first = state.rows_per_stream * state.streams
            sentinels = {first + i: label for i, label in enumerate(state.sentinels)}
            self.compressors.append(
                Compressor(
                    name=name,
                    ratio=ratio,
                    overlap=overlap,
                    layout=layout,
                    state_layout=state,
                    state=sentinels,
                )
            )

    def play(self, buffers: Buffers, tokens: Sequence[Token], shape: tuple[int, int]) -> None:
        """One step with padded buffers; AssertionError where they do a wrong thing."""
        for name, buffer in buffers.items():
            assert buffer.dtype == np.int64, name
            assert POISON not in buffer, f"{name} was not wholly written"
        labels: list[Label] = ["padding"] * (shape[0] * shape[1])
        for token in tokens:
            labels[token.row] = ("token", token.seq, token.pos)
            assert buffers["tokens"].ravel()[token.row] == token.token
            assert buffers["positions"].ravel()[token.row] == token.pos
        self._raw(buffers, labels, tokens, shape)
        for compressor in self.compressors:
            self._compress(compressor, buffers, labels, tokens, shape)

    def _raw(
        self,
        buffers: Buffers,
        labels: list[Label],
        tokens: Sequence[Token],
        shape: tuple[int, int],
    ) -> None:
        writes = buffers["plan.raw.write_idxs"].tolist()
        self._check_writes(self.raw_layout, writes, labels)
        self.raw.update(zip(writes, labels, strict=True))
        reads = buffers["plan.raw.read_idxs"]
        held = buffers["plan.raw.read_pos"]
        counts = buffers["plan.raw.read_counts"]
        live = self.raw_layout.rows_per_stream * self.raw_layout.streams
        assert reads.min() >= 0
        assert reads.max() < live
        real = {token.row // shape[1] for token in tokens}
        assert [s for s in range(shape[0]) if counts[s]] == sorted(real)
        assert not any(held[s, counts[s] :].any() for s in range(shape[0]))
        for token in tokens:
            stream = token.row // shape[1]
            count = counts[stream]
            listed = sorted(
                self.raw[int(row)]
                for row, pos in zip(reads[stream][:count], held[stream][:count], strict=True)
                if self._sees(token.pos, pos)
            )
            every = range(token.pos + 1)
            wanted = [("token", token.seq, p) for p in every if self._sees(token.pos, p)]
            assert listed == wanted

    def _sees(self, query: int, key: int) -> bool:
        return key <= query and (key < self.pinned or key > query - self.window)

    def _compress(
        self,
        c: Compressor,
        buffers: Buffers,
        labels: list[Label],
        tokens: Sequence[Token],
        shape: tuple[int, int],
    ) -> None:
        def plan(name: str) -> list[Any]:
            values: list[Any] = buffers[f"plan.{c.name}.{name}"].tolist()
            return values

        live = c.state_layout.rows_per_stream * c.state_layout.streams
        readable = live + len(c.state_layout.sentinels)
        assert all(0 <= row < readable for row in plan("state_old_idxs"))
        source = [c.state.get(row, "unwritten") for row in plan("state_old_idxs")] + labels
        windows = [tuple(source[row] for row in reads) for reads in plan("state_read_idxs")]
        assert all("padding" not in window and "unwritten" not in window for window in windows)
        marks = ["padding" if set(w) == {"padded_block"} else w for w in windows]
        self._check_writes(c.layout, plan("state_write_idxs"), marks)
        for window, pos in zip(marks, plan("state_write_pos"), strict=True):
            assert pos == (0 if window == "padding" else window[-1][2] + 1 - c.ratio)
        c.rows.update(zip(plan("state_write_idxs"), marks, strict=True))
        kept = [source[row] for row in plan("state_persist_src_idxs")]
        dst = plan("state_persist_dst_idxs")
        spare = c.state_layout.spare_start
        real = [k if d < spare else "padding" for k, d in zip(kept, dst, strict=True)]
        self._check_writes(c.state_layout, dst, real)
        assert "padding" not in kept
        c.state.update(zip(dst, kept, strict=True))
        self._check_ring(c, tokens)
        self._check_visible(c, buffers, labels, tokens, shape)

    @staticmethod
    def _check_writes(layout: RowLayout, rows: list[int], labels: Sequence[Label]) -> None:
        """Real rows in their own stream, padded ones in spare rows, none twice."""
        assert len(set(rows)) == len(rows), "a scatter target is written twice"
        for row, label in zip(rows, labels, strict=True):
            if label == "padding":
                assert layout.spare_start <= row < layout.rows
            else:
                owner = label[1] if label[0] == "token" else label[-1][1]
                assert row // layout.rows_per_stream == owner
                assert row < layout.rows_per_stream * layout.streams

    @staticmethod
    def _check_ring(c: Compressor, tokens: Sequence[Token]) -> None:
        """The last tokens of each sequence are in its ring."""
        ends = {token.seq: token.pos for token in tokens}
        size = c.state_layout.rows_per_stream
        for seq, last in ends.items():
            held = {c.state.get(seq * size + r) for r in range(size)}
            first = max(0, last + 1 - size)
            assert {("token", seq, pos) for pos in range(first, last + 1)} <= held

    def _check_visible(
        self,
        c: Compressor,
        buffers: Buffers,
        labels: list[Label],
        tokens: Sequence[Token],
        shape: tuple[int, int],
    ) -> None:
        counts = buffers[f"plan.{c.name}.n_visible"]
        state_pos = buffers[f"plan.{c.name}.state_pos"]
        rows = buffers[f"plan.{c.name}.rows"]
        assert rows.min() >= 0
        assert rows.max() < c.layout.rows_per_stream * c.layout.streams
        for row, label in enumerate(labels):
            if label == "padding":
                assert counts[row] == 0
        for token in tokens:
            assert state_pos[token.row] == token.pos % c.ratio
            seen = [c.rows[int(r)] for r in rows[token.row // shape[1], : counts[token.row]]]
            wanted = [
                self._window(c, token.seq, block)
                for block in range((token.pos + 1) // c.ratio)
            ]
            assert seen == wanted

    @staticmethod
    def _window(c: Compressor, seq: int, block: int) -> tuple[Label, ...]:
        first = (block - c.overlap) * c.ratio
        return tuple(
            ("token", seq, pos) if pos >= 0 else "no_previous_window"
            for pos in range(first, (block + 1) * c.ratio)
        )
