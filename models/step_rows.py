"""Contract rows that every family has: the tokens of a step, and the results that a host reads."""

from __future__ import annotations

from collections.abc import Collection

from cachegraph.models.contract import (
    EMBEDDINGS,
    LOGITS,
    OUT_ROWS,
    STREAMS,
    Dim,
    DType,
    Padding,
    Planner,
    Role,
    TensorRow,
)

PLACES = ("t", "y", "x")  # the positions of a token, where a family gives it three


def batch_rows(*, has_places: bool = False) -> tuple[TensorRow, ...]:
    """Tokens, their positions, and which rows of them want logits.

    has_places: a token has three positions, t, y and x, which are equal in text.
    """
    positions: tuple[Dim, ...] = ("S", "P", len(PLACES)) if has_places else ("S", "P")
    words = "position of each token in its sequence"
    rows: tuple[tuple[str, tuple[Dim, ...], Padding, str], ...] = (
        ("tokens", ("S", "P"), Padding.LAST, "token ids, stream-major"),
        ("positions", positions, Padding.LAST, words + (": t, y and x" if has_places else "")),
        (OUT_ROWS, ("O",), Padding.LAST, "rows of T whose logits are wanted"),
    )
    return tuple(
        TensorRow(
            name=name,
            dtype=DType.INT64,
            shape=shape,
            role=Role.BATCH,
            planner=Planner.BATCH,
            padding=padding,
            meaning=meaning,
        )
        for name, shape, padding, meaning in rows
    )


def results(
    vocab_size: int, hidden_size: int, stream_width: int, names: Collection[str]
) -> tuple[TensorRow, ...]:
    """The results of these names. stream_width: values of all residual streams of a token."""
    rows: tuple[tuple[str, tuple[Dim, ...], str], ...] = (
        (LOGITS, ("O", vocab_size), "scores of the next token at each of out_rows"),
        (EMBEDDINGS, ("O", hidden_size), "normed hidden state at each of out_rows"),
        (
            STREAMS,
            ("T", stream_width),
            "residual streams of each token after the last layer, before the head",
        ),
    )
    return tuple(
        TensorRow(
            name=name,
            dtype=DType.FLOAT32,
            shape=shape,
            role=Role.RESULT,
            is_output=True,
            meaning=meaning,
        )
        for name, shape, meaning in rows
        if name in names
    )
