"""Safetensors files written byte by byte, for storage forms that numpy has no dtype for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

Stored = tuple[str, tuple[int, ...], bytes]  # dtype as the format spells it, shape, data

_SPELLED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}


def plain(values: np.ndarray) -> Stored:
    """An array of a dtype that numpy or ml_dtypes knows."""
    return _SPELLED[values.dtype.name], values.shape, np.ascontiguousarray(values).tobytes()


def stored(dtype: str, values: np.ndarray) -> Stored:
    """Raw uint8 values under any one-byte dtype."""
    assert values.dtype == np.uint8
    return dtype, values.shape, np.ascontiguousarray(values).tobytes()


def write_file(path: Path, tensors: Mapping[str, Stored]) -> Path:
    """One file; tensors lie in the order given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape, data) in tensors.items():
        stop = start + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    body = b"".join(data for _, _, data in tensors.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def write_sharded(folder: Path, tensors: Mapping[str, Stored], num_shards: int) -> Path:
    """Several files and their index; a weight and its scale may land in different files."""
    names = list(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard::num_shards]
        write_file(folder / file, {name: tensors[name] for name in mine})
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
