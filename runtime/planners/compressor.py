"""The plan of one compressor: state rows to keep, windows that close, rows that each token sees.

Rows are those of specs: a ring row is stream * ring_rows + position mod ring_rows, a compressed row
stream * rows_per_stream + position div ratio. Works for any distinct positions >= 0 in any order;
which positions a sequence may take is the batch checker's rule. Knows nothing of padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cachegraph.models.contract import Contract
from cachegraph.models.errors import ContractError
from cachegraph.models.planner_specs import CompressorSpec
from cachegraph.runtime.batch import BoolArray, IntArray, SeqIds
from cachegraph.runtime.split import UBatch

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorSizes:
    """Sizes that one compressor plan is made with.

    ratio: tokens for each compressed row. overlap: windows reach back over the previous block.
    ring_rows: state rows of a stream. rows_per_stream: compressed rows of a stream.
    streams: sequences that the caches hold.
    """

    ratio: int
    overlap: bool
    ring_rows: int
    rows_per_stream: int
    streams: int

    @classmethod
    def of(cls, spec: CompressorSpec, contract: Contract) -> CompressorSizes:
        """Sizes from the contract's layouts.

        ContractError unless all caches that the plan serves agree in live, sentinel and spare rows.
        """
        layouts = [tuple(contract.layout(kind) for kind in pair) for pair in spec.serves]
        rows, state = layouts[0]
        if any(pair != (rows, state) for pair in layouts):
            raise ContractError(
                f"one plan serves {[served.value for served, _ in spec.serves]}, but their row "
                f"layouts differ: {layouts}; export again"
            )
        return cls(
            ratio=spec.ratio,
            overlap=spec.overlap,
            ring_rows=state.rows_per_stream,
            rows_per_stream=rows.rows_per_stream,
            streams=rows.streams,
        )

    @property
    def window(self) -> int:
        """Tokens that one compressed row is made of: 2R with overlap, else R."""
        return 2 * self.ratio if self.overlap else self.ratio

    @property
    def state_rows(self) -> int:
        """Ring rows of all streams: where the step's own tokens start in the read index space."""
        return self.ring_rows * self.streams


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTokens:
    """What a compressor plan is made from.

    positions: [n]. owner_tokens, owner_streams, owner_positions: [m], each token with each sequence
    that owns it, in token order, then in the order of the token's ids.
    """

    positions: IntArray
    owner_tokens: IntArray
    owner_streams: IntArray
    owner_positions: IntArray

    @classmethod
    def of_ubatch(cls, ubatch: UBatch) -> PlanTokens:
        """The tokens of a ubatch, each owned by its stream."""
        return cls(
            positions=ubatch.positions,
            owner_tokens=np.arange(ubatch.positions.size),
            owner_streams=np.repeat(np.array(ubatch.streams, np.int64), ubatch.step),
            owner_positions=ubatch.positions,
        )

    @classmethod
    def of_owners(cls, positions: IntArray, seq_ids: SeqIds) -> PlanTokens:
        """Tokens with the ids of each; a token may have several or none."""
        owned = np.repeat(np.arange(positions.size), [len(ids) for ids in seq_ids])
        flat = [seq for ids in seq_ids for seq in ids]
        return cls(
            positions=positions,
            owner_tokens=owned,
            owner_streams=np.array(flat, np.int64),
            owner_positions=positions[owned],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorPlan:
    """Logical lists of one compressor for n tokens and b closing blocks.

    state_pos: [n] position mod ratio. state_delta_*: [n] token and the ring row of its first
    sequence. state_persist_*: token to keep and ring row, one entry for each ring row, by row.
    state_write_idxs, state_write_pos: [b] compressed row and position of the block's first token.
    state_read_idxs: [window * b], previous windows of all blocks first (with overlap), then the
    current ones; index space [state_rows ring rows | n tokens | no previous window].
    n_visible: [n] compressed rows that each token sees. num_exposed: compressed rows that must be
    exposed to each stream: the largest of these counts, at least 1.
    """

    state_pos: IntArray
    state_delta_src_idxs: IntArray
    state_delta_dst_idxs: IntArray
    state_persist_src_idxs: IntArray
    state_persist_dst_idxs: IntArray
    state_read_idxs: IntArray
    state_write_idxs: IntArray
    state_write_pos: IntArray
    n_visible: IntArray
    num_exposed: int

    @property
    def num_blocks(self) -> int:
        """Blocks that close in the step."""
        return int(self.state_write_idxs.size)


def plan_compressor(sizes: CompressorSizes, tokens: PlanTokens) -> CompressorPlan:
    """Plan one step; changes nothing. Positions are distinct in each sequence and not negative."""
    positions, owned = tokens.positions, tokens.owner_positions
    ring = tokens.owner_streams * sizes.ring_rows + owned % sizes.ring_rows
    persist_src, persist_dst = _persist(tokens.owner_tokens, owned, ring)
    closing = ((owned + 1) % sizes.ratio == 0).nonzero()[0]
    read_idxs = write_idxs = write_pos = _NONE
    if closing.size:
        streams = tokens.owner_streams[closing]
        write_pos = owned[closing] + 1 - sizes.ratio
        write_idxs = streams * sizes.rows_per_stream + write_pos // sizes.ratio
        read_idxs = _windows(sizes, tokens, streams, write_pos)
    return CompressorPlan(
        state_pos=positions % sizes.ratio,
        state_delta_src_idxs=np.arange(positions.size),
        state_delta_dst_idxs=ring if ring.size == positions.size else _first(tokens, ring),
        state_persist_src_idxs=persist_src,
        state_persist_dst_idxs=persist_dst,
        state_read_idxs=read_idxs,
        state_write_idxs=write_idxs,
        state_write_pos=write_pos,
        n_visible=(positions + 1) // sizes.ratio,
        num_exposed=max(1, (max(positions.tolist(), default=-1) + 1) // sizes.ratio),
    )


def _first(tokens: PlanTokens, ring: IntArray) -> IntArray:
    """Of each owned token, the ring row in its first sequence."""
    return ring[np.unique(tokens.owner_tokens, return_index=True)[1]]


def _persist(
    tokens: IntArray, positions: IntArray, ring: IntArray
) -> tuple[IntArray, IntArray]:
    """Tokens to keep and their ring rows: the largest position wins a row; sorted by row."""
    if ring.size < 2:
        return tokens, ring
    order = np.lexsort((positions, ring))
    sorted_rows = ring[order]
    last = np.ones(ring.size, np.bool_)
    np.not_equal(sorted_rows[1:], sorted_rows[:-1], out=last[:-1])
    return tokens[order[last]], sorted_rows[last]


def _windows(
    sizes: CompressorSizes, tokens: PlanTokens, streams: IntArray, write_pos: IntArray
) -> IntArray:
    """Read rows of the closing windows, in the order and index space of `CompressorPlan`."""
    back = sizes.window - sizes.ratio
    wanted = write_pos[:, None] + np.arange(-back, sizes.ratio)  # [b, window]
    rows = streams[:, None] * sizes.ring_rows + wanted % sizes.ring_rows
    token, is_found = _find(tokens, streams, wanted)
    rows[is_found] = sizes.state_rows + token[is_found]
    rows[wanted < 0] = sizes.state_rows + tokens.positions.size
    return np.concatenate((rows[:, :back].ravel(), rows[:, back:].ravel()))


def _find(
    tokens: PlanTokens, streams: IntArray, wanted: IntArray
) -> tuple[IntArray, BoolArray]:
    """The token of the same stream at each wanted position [b, w], and whether there is one."""
    span = int(tokens.owner_positions.max()) + 2
    keys = tokens.owner_streams * span + tokens.owner_positions
    order = keys.argsort()
    keys = keys[order]
    asked = streams[:, None] * span + np.maximum(wanted, -1)
    place = np.minimum(keys.searchsorted(asked), keys.size - 1)
    is_found = (keys[place] == asked) & (wanted >= 0)
    return tokens.owner_tokens[order[place]], is_found
