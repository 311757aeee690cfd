"""Safetensors files: headers checked in full, bytes read range by range.

The header is parsed here because the safetensors library gives numpy no bfloat16 and no 8-bit
floats. Plain reads are used, not a memory map, so that resident memory stays at what was asked for.
Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from cachegraph.models.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_MAX_HEADER = 100 << 20  # the limit that the format sets


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor in a file: dtype in safetensors' spelling, and where its bytes are."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def read(self, first_item: int = 0, num_items: int | None = None) -> np.ndarray:
        """Bytes of a run of items (all of them by default), as uint8 [bytes].

        CheckpointError where the file has become shorter since its header was read.
        """
        size = ITEM_BYTES[self.dtype]
        count = (prod(self.shape) if num_items is None else num_items) * size
        try:
            data = np.fromfile(
                self.path, np.uint8, count, offset=self.start + first_item * size
            )
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        if data.size != count:
            raise _damaged(self.path, f"{self.name} ends {count - data.size} bytes early")
        return data


def read_folder(folder: Path) -> dict[str, Entry]:
    """Every tensor of a checkpoint folder, sharded or single, by its name in the file.

    CheckpointError where there are no weights, where an index and its shards disagree, or where a
    file is damaged.
    """
    index = folder / INDEX
    if index.is_file():
        return _read_shards(index)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    other = sorted(path.name for path in folder.glob("*") if path.suffix in _WEIGHT_SUFFIXES)
    found = f"; it holds {', '.join(other[:4])}" if other else ""
    raise CheckpointError(
        f"{folder} has neither {INDEX} nor {SINGLE}{found}; download the safetensors files of the "
        "checkpoint with their index"
    )


_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def _read_shards(index: Path) -> dict[str, Entry]:
    weight_map = _weight_map(index)
    shards = {shard: index.parent / shard for shard in sorted(set(weight_map.values()))}
    absent = [shard for shard, path in shards.items() if not path.is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names shards that are not there: {', '.join(absent)}; download them"
        )
    entries: dict[str, Entry] = {}
    for shard, path in shards.items():
        for name, entry in read_header(path).items():
            if weight_map.get(name, shard) == shard:
                entries[name] = entry
    lost = sorted(set(weight_map) - set(entries))
    if lost:
        raise CheckpointError(
            f"{index} places {len(lost)} tensors in shards that lack them, {lost[0]} in "
            f"{weight_map[lost[0]]} first; download index and shards of one revision"
        )
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    content = _json(index, index.read_bytes(), "the index")
    weight_map = content.get("weight_map") if isinstance(content, Mapping) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged(index, "it has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise _damaged(
                index, f"the shard of {name} is {shard!r}, not a file name beside it"
            )
    return weight_map


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of one file. CheckpointError where the file is damaged or cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little") if size >= 8 else -1
        if not 0 <= length <= min(size - 8, _MAX_HEADER):
            raise _damaged(path, f"{size} bytes cannot hold a header of {length}")
        header = _json(path, file.read(length), "the header")
    if not isinstance(header, dict):
        raise _damaged(path, "the header is not an object")
    header.pop("__metadata__", None)
    base = 8 + length
    spans = {name: _span(path, name, row) for name, row in header.items()}
    end = base
    for start, stop in sorted(spans.values()):
        if base + start != end:
            raise _damaged(path, "its header has tensors that overlap or leave bytes out")
        end = base + stop
    if end != size:
        raise _damaged(path, f"its header describes {end} bytes and the file has {size}")
    return {
        name: Entry(
            path=path,
            name=name,
            dtype=row["dtype"],
            shape=tuple(row["shape"]),
            start=base + spans[name][0],
        )
        for name, row in header.items()
    }


def _span(path: Path, name: str, row: object) -> tuple[int, int]:
    """The byte range of one header row, checked against its dtype and shape."""
    try:
        dtype, shape, (start, stop) = row["dtype"], row["shape"], row["data_offsets"]  # type: ignore[index]
        wanted = prod(shape) * ITEM_BYTES[dtype]
        is_sane = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"the header row of {name} is {row!r}") from error
    if not is_sane or stop - start != wanted:
        raise _damaged(path, f"{name} is {dtype} {shape} in bytes {start} to {stop}")
    return start, stop


def _json(path: Path, data: bytes, what: str) -> object:
    try:
        return json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _damaged(path, f"{what} is not JSON ({error})") from error


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or cut short: {what}; download the file again")
