"""Writes a bundle's weights as one safetensors file that graphs use as ONNX external data.

The header is made from declared shapes before any data is read, large tensors first; pieces are
then written at their offsets in whatever order the recipes yield them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from cachegraph.graphgen.weights.parameter import Piece, Read, Recipe, Weight
from cachegraph.models.errors import GraphBuildError

# INT4 is stored as U8: safetensors has no 4-bit type.
_FORMS: Mapping[ir.DataType, tuple[str, np.dtype]] = {
    ir.DataType.FLOAT: ("F32", np.dtype(np.float32)),
    ir.DataType.FLOAT16: ("F16", np.dtype(np.float16)),
    ir.DataType.BFLOAT16: ("BF16", np.dtype(ml_dtypes.bfloat16)),
    ir.DataType.INT64: ("I64", np.dtype(np.int64)),
    ir.DataType.INT8: ("I8", np.dtype(np.int8)),
    ir.DataType.UINT8: ("U8", np.dtype(np.uint8)),
    ir.DataType.INT4: ("U8", np.dtype(np.uint8)),
}


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Where each weight lies in the file: absolute offsets, and the header bytes."""

    header: bytes
    offsets: Mapping[str, int]
    num_bytes: int

    @property
    def header_sha256(self) -> str:
        """Hash of the header, which names every tensor, shape and offset."""
        return hashlib.sha256(self.header).hexdigest()


def plan_layout(weights: Iterable[Weight]) -> WeightsLayout:
    """Lay the tensors out, large first; one that several graphs share, once."""
    entries: dict[str, dict[str, object]] = {}
    starts: dict[str, int] = {}
    position = 0
    stored = dict.fromkeys(weight.stored for weight in weights)
    for weight in sorted(stored, key=lambda w: (-w.num_bytes, str(w.name))):
        name = str(weight.name)
        assert name not in starts, f"two weights of different graphs are called {name}"
        form, _ = _FORMS[_dtype(weight)]
        shape = list(weight.sizes)
        if weight.dtype is ir.DataType.INT4:
            shape = [weight.num_bytes]
        end = position + weight.num_bytes
        entries[name] = {"dtype": form, "shape": shape, "data_offsets": [position, end]}
        starts[name] = position
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + start for name, start in starts.items()}
    return WeightsLayout(header, offsets, len(header) + position)


def attach(weights: Iterable[Weight], layout: WeightsLayout, file_name: str) -> None:
    """Point each weight at its bytes in the weights file."""
    for weight in weights:
        weight.const_value = ir.ExternalTensor(
            location=file_name,
            offset=layout.offsets[str(weight.stored.name)],
            length=weight.num_bytes,
            dtype=_dtype(weight),
            shape=ir.Shape(weight.sizes),
            name=str(weight.name),
        )


def write_weights(
    path: Path,
    layout: WeightsLayout,
    recipes: Iterable[Recipe],
    read: Read,
    progress: Callable[[int], None],
) -> str:
    """Make and write every piece; returns the file's sha256. `progress` gets bytes written."""
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.num_bytes)
        for recipe in recipes:
            written = dict.fromkeys(recipe.weights, 0)
            for piece in recipe.make(read):
                size = _write_piece(file.fileno(), recipe.weights[piece.key], layout, piece)
                written[piece.key] += size
                progress(size)
            _check_complete(recipe, written)
    return file_sha256(path)


def file_sha256(path: Path) -> str:
    """Hash of a whole file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_piece(fd: int, weight: Weight, layout: WeightsLayout, piece: Piece) -> int:
    _, dtype = _FORMS[_dtype(weight)]
    values: NDArray[np.generic] = np.ascontiguousarray(piece.values.astype(dtype, copy=False))
    if weight.dtype is not ir.DataType.INT4:
        want = weight.sizes[1:]
        if values.shape[1:] != want:
            raise GraphBuildError(
                f"{weight.name}: a recipe made rows of shape {values.shape[1:]}, wanted {want}"
            )
    data = values.reshape(-1).view(np.uint8)
    row_bytes = data.size // max(1, len(values))
    start = layout.offsets[str(weight.name)] + piece.start * row_bytes
    view = data.data
    while view:
        count = os.pwrite(fd, view, start)
        start, view = start + count, view[count:]
    return int(data.size)


def _check_complete(recipe: Recipe, written: Mapping[str, int]) -> None:
    for key, size in written.items():
        weight = recipe.weights[key]
        if size != weight.num_bytes:
            raise GraphBuildError(
                f"{weight.name}: its recipe wrote {size} of {weight.num_bytes} bytes"
            )


def _dtype(weight: Weight) -> ir.DataType:
    assert weight.dtype is not None
    return weight.dtype
