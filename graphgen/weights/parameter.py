"""Graph parameters that know how they are made from a checkpoint.

A `Recipe` reads source tensors and yields pieces of the stored tensors; it never holds more than
the piece it works on, so that an expert stack is written one expert at a time. Knows nothing of
files: `reader` supplies tensors, `writer` stores pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import nn

Read = Callable[[str], NDArray[Any]]


class Piece(NamedTuple):
    """Entries [start, start + len(values)) along axis 0 of the tensor stored under `key`."""

    key: str
    start: int
    values: NDArray[Any]


Make = Callable[[Read], Iterator[Piece]]


@dataclass(eq=False, slots=True)
class Recipe:
    """Makes one or more stored tensors from the same sources. `weights` lists them by key."""

    make: Make
    weights: dict[str, Weight] = field(default_factory=dict)

    def weight(
        self, key: str, shape: Sequence[int], dtype: ir.DataType = ir.DataType.FLOAT
    ) -> Weight:
        """Declare the tensor that pieces of this key fill."""
        self.weights[key] = Weight(shape, dtype, self)
        return self.weights[key]


class Weight(nn.Parameter):
    """A parameter with a recipe; its data lives in the bundle's weights file.

    `stored` is the weight whose bytes it reads: itself, or one of another graph (`share`).
    """

    def __init__(self, shape: Sequence[int], dtype: ir.DataType, recipe: Recipe) -> None:
        super().__init__(list(shape), dtype)
        self.recipe = recipe
        self.stored = self

    @property
    def num_bytes(self) -> int:
        """Bytes in the weights file."""
        assert self.dtype is not None
        return (prod(self.sizes) * self.dtype.bitwidth + 7) // 8

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape as numbers."""
        assert self.shape is not None
        return tuple(self.shape.numpy())


def share(module: nn.Module, source: nn.Module) -> None:
    """Let a module's weights read the bytes of those of `source`, made alike for another graph.

    A parameter belongs to one graph, so that a second one needs parameters of its own.
    """
    for ours, theirs in zip(module.parameters(), source.parameters(), strict=True):
        assert isinstance(ours, Weight)
        assert isinstance(theirs, Weight)
        assert (ours.sizes, ours.dtype) == (theirs.sizes, theirs.dtype)
        ours.stored, ours.recipe = theirs, theirs.recipe


def tensor(
    source: Callable[[Read], NDArray[Any]],
    shape: Sequence[int],
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> Weight:
    """A weight made in one piece by `source`."""

    def make(read: Read) -> Iterator[Piece]:
        yield Piece("value", 0, source(read))

    return Recipe(make).weight("value", shape, dtype)


def vector(name: str, size: int) -> Weight:
    """A one-dimensional f32 weight, copied as it is."""
    return tensor(lambda read: read(name).reshape(size), [size])
