"""A made-up checkpoint of any family on disk: config.json and one safetensors file, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.tensor_specs import TensorKind, TensorSpec


def write_tensors(
    folder: Path,
    config_json: Mapping[str, object],
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[TensorSpec, NDArray[Any]]],
    dtype: str,
) -> Path:
    """Write the two files, one tensor at a time; `tensors` come in the order of `specs`.

    dtype: F32, or F16 for all but parameters and integers, which stay F32 and I64.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_json, indent=1)
    (folder / "config.json").write_text(text, encoding="utf-8")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in specs:
        form, numpy_dtype = _storage(spec, dtype)
        size = int(np.prod(spec.shape)) * numpy_dtype.itemsize
        span = [position, position + size]
        header[spec.name] = {"dtype": form, "shape": list(spec.shape), "data_offsets": span}
        position += size
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        for spec, values in tensors:
            file.write(values.astype(_storage(spec, dtype)[1]).tobytes())
    return folder


def _storage(spec: TensorSpec, dtype: str) -> tuple[str, np.dtype[Any]]:
    if spec.kind is TensorKind.TABLE:
        return "I64", np.dtype(np.int64)
    is_half = dtype == "F16" and spec.kind is not TensorKind.PARAMETER
    return ("F16", np.dtype(np.float16)) if is_half else ("F32", np.dtype(np.float32))
