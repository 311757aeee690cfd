"""The batch a caller wants decoded, and the rules it must keep before anything is planned.

Owns the rules of positions and every refusal of a bad batch. `consecutive`: first 0, then last + 1,
for each sequence. `ordered`: a token has three positions, t, y and x, and t never falls; it may
repeat inside an image and jump after it. Knows nothing of caches, buckets or graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cachegraph.models.errors import BatchError, CapacityError

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
SeqIds = tuple[tuple[int, ...], ...]
PositionRule = Literal["consecutive", "ordered"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Tokens to decode, in the caller's order. Sequences may be interleaved and unequal.

    tokens, positions: int64 [n]. seq_ids: the distinct sequences that own each token.
    wants_logits: bool [n]. places: int64 [n, 3], positions t, y and x of each token, of which
    `positions` is the first; None where all three are alike, as in text.
    """

    tokens: IntArray
    positions: IntArray
    seq_ids: SeqIds
    wants_logits: BoolArray
    places: IntArray | None = None

    @classmethod
    def of(
        cls,
        tokens: ArrayLike,
        positions: ArrayLike | None = None,
        seq_ids: Sequence[int | Sequence[int]] | None = None,
        logits: ArrayLike | None = None,
        *,
        starts: Mapping[int, int] | None = None,
    ) -> Batch:
        """Build a batch from lists or arrays; BatchError where lengths or types do not fit.

        positions: None counts each sequence on from `starts` (0 where it names none); [n, 3] where
            the family gives a token three.
        seq_ids: None puts every token in sequence 0; an id listed twice counts once.
        logits: a bool for each token or one for all; None asks for each sequence's last token.
        """
        ids = _integers("tokens", tokens)
        owners = _owners(seq_ids, ids.size)
        places = None
        if positions is None:
            firsts = _counted(owners, starts or {})
        elif np.ndim(positions) == 2:
            places = _places(positions)
            firsts = places[:, 0].copy()
        else:
            firsts = _integers("positions", positions)
        _same_length("positions", firsts.size, ids.size)
        wanted = _last_of_each(owners) if logits is None else _flags(logits, ids.size)
        return cls(
            tokens=ids, positions=firsts, seq_ids=owners, wants_logits=wanted, places=places
        )

    def placed(self) -> Batch:
        """The batch with three positions for each token: in text all three are alike."""
        if self.places is not None:
            return self
        return replace(self, places=np.repeat(self.positions[:, None], 3, axis=1))

    def __len__(self) -> int:
        return int(self.tokens.size)

    def rows_of_sequences(self) -> dict[int, IntArray]:
        """Batch rows of each sequence in batch order, by order of first appearance."""
        if len(self) == 1:
            return {seq: np.zeros(1, np.int64) for seq in self.seq_ids[0]}
        rows: dict[int, list[int]] = {}
        for row, owners in enumerate(self.seq_ids):
            for seq in owners:
                rows.setdefault(seq, []).append(row)
        return {seq: np.array(found, np.int64) for seq, found in rows.items()}


def check_batch(
    batch: Batch,
    *,
    vocab_size: int,
    context: int,
    sequences: int,
    next_positions: Mapping[int, int],
    lengths: Mapping[int, int] | None = None,
    rule: PositionRule = "consecutive",
) -> None:
    """Refuse a batch that breaks a rule; changes nothing.

    next_positions: the position each sequence expects, by rule `ordered` the lowest; a sequence not
    named expects 0. lengths: tokens of each sequence, where they differ from that.
    BatchError names the token and the rule; CapacityError a sequence that would outgrow its
    context.
    """
    if len(batch) == 0:
        raise BatchError("the batch is empty; send at least one token")
    _check_tokens(batch, vocab_size)
    _check_owners(batch, sequences)
    if rule == "consecutive" and batch.places is not None:
        raise BatchError("positions has three entries for a token; this family takes one")
    rows = batch.rows_of_sequences()
    check = _check_ordered if rule == "ordered" else _check_positions
    for seq, found in rows.items():
        check(seq, found, batch.positions[found], next_positions.get(seq, 0))
    held = next_positions if lengths is None else lengths
    for seq, found in rows.items():
        _check_context(seq, found, held.get(seq, 0), context)


def _check_tokens(batch: Batch, vocab_size: int) -> None:
    bad = (batch.tokens < 0) | (batch.tokens >= vocab_size)
    if bad.any():
        row = int(bad.argmax())
        raise BatchError(
            f"token {row}: id {batch.tokens[row]} is not in the vocabulary, "
            f"which has ids 0 to {vocab_size - 1}"
        )
    every = batch.positions[:, None] if batch.places is None else batch.places
    negative = (every < 0).any(axis=1)
    if negative.any():
        row = int(negative.argmax())
        raise BatchError(
            f"token {row}: position {every[row].min()} is negative; positions start at 0"
        )


def _check_owners(batch: Batch, sequences: int) -> None:
    for row, owners in enumerate(batch.seq_ids):
        if not owners:
            raise BatchError(f"token {row}: belongs to no sequence; give it one id")
        for seq in owners:
            if not 0 <= seq < sequences:
                raise BatchError(
                    f"token {row}: unknown sequence {seq}; this engine has sequences "
                    f"0 to {sequences - 1}"
                )


def _check_positions(seq: int, rows: IntArray, positions: IntArray, expected: int) -> None:
    wanted = expected + np.arange(rows.size)
    bad = positions != wanted
    if not bad.any():
        return
    first = int(bad.argmax())
    got, want = int(positions[first]), int(wanted[first])
    fault = "gap" if got > want else "repeat" if got == want - 1 else "step back"
    raise BatchError(
        f"token {rows[first]}: {fault} in sequence {seq}: position {got}, wanted {want}; "
        "positions of a sequence start at 0 and rise by 1"
    )


def _check_ordered(seq: int, rows: IntArray, positions: IntArray, least: int) -> None:
    before = np.concatenate(([least], positions[:-1]))
    bad = positions < before
    if not bad.any():
        return
    first = int(bad.argmax())
    raise BatchError(
        f"token {rows[first]}: step back in sequence {seq}: position {positions[first]} after "
        f"{before[first]}; the first position of a token never falls"
    )


def _check_context(seq: int, rows: IntArray, start: int, context: int) -> None:
    room = context - start
    if rows.size > room:
        raise CapacityError(
            f"token {rows[room]}: sequence {seq} is full: {start} of {context} positions are "
            f"taken, {rows.size} tokens were sent, {room} fit; "
            "clear the sequence or export with a larger context"
        )


def _integers(what: str, values: ArrayLike) -> IntArray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BatchError(
            f"{what} must be one list of integers, got shape {array.shape} of {array.dtype}"
        )
    copy: IntArray = array.astype(np.int64)
    return copy


def _places(values: ArrayLike) -> IntArray:
    array = np.asarray(values)
    if array.shape[1:] != (3,) or array.dtype.kind not in "iu":
        raise BatchError(
            f"positions must be one list of integers or three for each token, got shape "
            f"{array.shape} of {array.dtype}"
        )
    copy: IntArray = array.astype(np.int64)
    return copy


def _owners(seq_ids: Sequence[int | Sequence[int]] | None, count: int) -> SeqIds:
    if seq_ids is None:
        return ((0,),) * count
    _same_length("seq_ids", len(seq_ids), count)
    return tuple(
        (int(ids),)
        if isinstance(ids, (int, np.integer))
        else tuple(dict.fromkeys(map(int, ids)))
        for ids in seq_ids
    )


def _counted(owners: SeqIds, starts: Mapping[int, int]) -> IntArray:
    following = dict(starts)
    positions = np.zeros(len(owners), np.int64)
    for row, ids in enumerate(owners):
        for seq in ids:
            positions[row] = following.get(seq, 0)
            following[seq] = int(positions[row]) + 1
    return positions


def _last_of_each(owners: SeqIds) -> BoolArray:
    wanted = np.zeros(len(owners), np.bool_)
    last = {seq: row for row, ids in enumerate(owners) for seq in ids}
    wanted[list(last.values())] = True
    return wanted


def _flags(logits: ArrayLike, count: int) -> BoolArray:
    flags = np.asarray(logits)
    if flags.dtype.kind not in "biu" or flags.ndim > 1:
        raise BatchError(
            f"logits must be one flag or a list of them, got shape {flags.shape} of {flags.dtype}"
        )
    if flags.ndim == 1:
        _same_length("logits", flags.size, count)
    return np.broadcast_to(flags.astype(np.bool_), (count,)).copy()


def _same_length(what: str, got: int, wanted: int) -> None:
    if got != wanted:
        raise BatchError(f"{what} has {got} entries for {wanted} tokens; give one for each")
