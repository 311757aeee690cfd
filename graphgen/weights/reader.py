"""A checkpoint that gives one tensor at a time as float32 (the token-to-expert table as int64).

Nothing is kept between reads, so export holds no more than the tensors it asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.draft_tensors import has_draft
from cachegraph.models.deepseek_v4.tensors import TensorSpec
from cachegraph.models.errors import CheckpointError

_INTEGERS: dict[str, np.dtype] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}


class Checkpoint:
    """Tensors of one model by our name; see `models/deepseek_v4/tensors.py`."""

    def __init__(self, config: DeepseekV4Config, sources: Mapping[str, Source]) -> None:
        self.config = config
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

        CheckpointError for an unknown name, a file that changed, a scale that is not a number, or a
        table entry that names no expert.
        """
        source = self._source(name)
        spec = source.spec
        data = source.entry.read(source.first_item, num_items(source))
        if source.form is Form.INTEGER:
            return self._table(source, data)
        if source.form is Form.FLOAT:
            return decode_floats(data, source.entry.dtype).reshape(spec.shape)
        assert source.scale is not None  # match_tensors gives packed sources one
        scales = _scales(source.scale)
        unpack = dequantize_fp8 if source.form is Form.FP8 else dequantize_fp4
        return unpack(data, scales, spec.shape[1])

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            raise CheckpointError(f"the model has no tensor {name!r}")
        return self._sources[name]

    def _table(self, source: Source, data: np.ndarray) -> np.ndarray:
        table: np.ndarray = data.view(_INTEGERS[source.entry.dtype]).astype(np.int64)
        experts = self.config.num_experts
        if table.size and not 0 <= table.min() <= table.max() < experts:
            raise CheckpointError(
                f"{source.entry.name} names experts {table.min()} to {table.max()}; the model has "
                f"0 to {experts - 1}; take config.json and weights from one checkpoint"
            )
        return table.reshape(source.spec.shape)


def _scales(entry: Entry) -> np.ndarray:
    return decode_scales(entry.name, entry.read(), entry.dtype).reshape(entry.shape)


def holds_draft(folder: Path) -> bool:
    """Whether a checkpoint has the MTP block; CheckpointError where its files are damaged."""
    return has_draft(read_folder(folder))


def open_checkpoint(
    folder: Path, config: DeepseekV4Config, *, with_draft: bool = False
) -> Checkpoint:
    """The checkpoint in a folder, single or sharded, with every tensor of `config` found.

    with_draft: those of the MTP block too; they are left out otherwise. Reads headers only.
    CheckpointError where files are damaged or absent, or listing all missing, unexpected and
    mis-shaped tensors at once.
    """
    folder = Path(folder)
    entries = read_folder(folder)
    sources = match_tensors(config, entries, str(folder), with_draft=with_draft)
    return Checkpoint(config, sources)
