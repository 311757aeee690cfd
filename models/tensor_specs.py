"""What a tensor table says of each tensor, and how a family's files spell it.

Shared by all families; each has a table of its own. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

Shape = tuple[int, ...]


class TensorKind(StrEnum):
    """What a tensor is, which decides what it may be stored as."""

    PARAMETER = "parameter"  # norms, biases, convolutions and the like: float, never packed
    FLOAT_MATRIX = "float_matrix"  # matrices that stay in float, such as embedding and head
    MATRIX = "matrix"  # dense projections: float, or FP8 with block scales
    EXPERT = "expert"  # one expert's matrix: float, FP8, or FP4 with scales per 32
    NGRAM = "ngram"  # rows of an n-gram table: float, or FP8 with one scale for all of it
    TABLE = "table"  # integers


PACKED_KINDS = (TensorKind.MATRIX, TensorKind.EXPERT)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of the model, as the builder reads it (one expert's matrix at a time).

    is_zero_centred: a norm's weight stored as w - 1. below: integers are from 0 to under it.
    values: the integers themselves, where the config says them.
    """

    name: str
    shape: Shape
    kind: TensorKind
    is_zero_centred: bool = False
    below: int | None = None
    values: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedPart:
    """Where one expert's matrix lies in a tensor [experts, rows, columns] of all experts."""

    name: str
    expert: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """A tensor [experts, rows, columns] of all experts of a layer, and their matrices in it."""

    shape: Shape
    parts: tuple[FusedPart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorTable:
    """Every tensor of one model, and the names that a checkpoint gives them.

    family: of messages. canonical: our name of a tensor in a file. fused: by canonical name, None
    for a tensor that holds no experts. scale: canonical name of a packed tensor's scales.
    is_left_out: a canonical name that the model does not use. refusal: why a canonical name means
    another architecture.
    """

    family: str
    specs: tuple[TensorSpec, ...]
    canonical: Callable[[str], str]
    fused: Callable[[str], Fused | None]
    scale: Callable[[TensorSpec], str]
    is_left_out: Callable[[str], bool]
    refusal: Callable[[str], str | None]
