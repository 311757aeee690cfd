"""A checkpoint that gives one tensor at a time as float32 (tables of integers as int64).

Nothing is kept between reads, so export holds no more than the tensors it asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cachegraph.graphgen.weights.dequant import (
    decode_floats,
    decode_scales,
    dequantize_fp4,
    dequantize_fp8,
)
from cachegraph.graphgen.weights.files import Entry, read_folder
from cachegraph.graphgen.weights.match import Form, Source, match_tensors, num_items
from cachegraph.models.errors import CheckpointError
from cachegraph.models.tensor_specs import TensorSpec, TensorTable

_INTEGERS: dict[str, np.dtype] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}


class Checkpoint:
    """Tensors of one model by our name; see `models/<family>/tensors.py`."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor that can be read, in table order."""
        return tuple(source.spec for source in self._sources.values())

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def form(self, name: str) -> Form:
        """How a tensor is stored."""
        return self._source(name).form

    def read(self, name: str) -> np.ndarray:
        """One tensor in its torch shape, float32, dequantised; tables int64. A fresh array.

        CheckpointError for an unknown name, a file that changed, a scale that is not a number, or
        integers that the model cannot have.
        """
        source = self._source(name)
        spec = source.spec
        data = source.entry.read(source.first_item, num_items(source))
        if source.form is Form.INTEGER:
            return _integers(source, data)
        if source.form is Form.FLOAT:
            return decode_floats(data, source.entry.dtype).reshape(spec.shape)
        assert source.scale is not None  # match_tensors gives packed sources one
        scales = _scales(source.scale)
        if source.form is Form.FP8_SHARED:
            values = decode_floats(data, source.entry.dtype).reshape(spec.shape)
            values *= scales
            return values
        unpack = dequantize_fp8 if source.form is Form.FP8 else dequantize_fp4
        return unpack(data, scales, spec.shape[1])

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            raise CheckpointError(f"the model has no tensor {name!r}")
        return self._sources[name]


def _integers(source: Source, data: np.ndarray) -> np.ndarray:
    """A table of integers, checked against what the config says of them."""
    spec, name = source.spec, source.entry.name
    table: np.ndarray = data.view(_INTEGERS[source.entry.dtype]).astype(np.int64)
    fault = ""
    if spec.values is not None and tuple(table.tolist()) != spec.values:
        fault = f"{name} holds {_few(table.tolist())}, wanted {_few(spec.values)}"
    if (
        spec.below is not None
        and table.size
        and not 0 <= table.min() <= table.max() < spec.below
    ):
        fault = f"{name} holds {table.min()} to {table.max()}, wanted 0 to {spec.below - 1}"
    if fault:
        raise CheckpointError(f"{fault}; take config.json and weights from one checkpoint")
    return table.reshape(spec.shape)


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return f"{shown} ..." if len(numbers) > 4 else shown


def _scales(entry: Entry) -> np.ndarray:
    return decode_scales(entry.name, entry.read(), entry.dtype).reshape(entry.shape)


def open_checkpoint(folder: Path, table: TensorTable) -> Checkpoint:
    """The checkpoint in a folder, single or sharded, with every tensor of `table` found.

    Reads headers, and the integers that the config says too. CheckpointError where files are
    damaged or absent, where those integers differ, or listing all missing, unexpected and
    mis-shaped tensors at once.
    """
    folder = Path(folder)
    checkpoint = Checkpoint(match_tensors(table, read_folder(folder), str(folder)))
    for spec in checkpoint.specs:
        if spec.values is not None:
            checkpoint.read(spec.name)
    return checkpoint
