"""N-gram tables that the host holds: rows of a memory-mapped file, looked up in every step.

Nothing of the file stays in this process beside the pages that the operating system keeps.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.contract import DType
from cachegraph.models.errors import ContractError
from cachegraph.models.manifest import Manifest, NgramFile
from cachegraph.runtime.batch import IntArray

Rows = NDArray[np.float32]

# As safetensors names the types that tables are stored in.
_FORMS = {DType.FLOAT32: "F32", DType.FLOAT16: "F16", DType.BFLOAT16: "BF16"}


class NgramTables:
    """The tables of all modules, in turn."""

    def __init__(
        self, tables: Sequence[NDArray[Any]], heads: Sequence[int], dtype: DType
    ) -> None:
        """heads: of each module. dtype: of the tables, of which bfloat16 comes as its bits."""
        self._tables = tuple(tables)
        self._edges = np.cumsum([0, *heads])
        self._dtype = dtype

    @classmethod
    def open(cls, folder: Path, manifest: Manifest) -> NgramTables | None:
        """The tables of a bundle; None where its graph holds them or it has none.

        ContractError where the file does not hold what the manifest says.
        """
        entry = manifest.ngram_tables
        if entry is None:
            return None
        heads = [len(spec.primes) for spec in manifest.planners.ngrams]
        return cls(_mapped(folder / entry.file, entry), heads, entry.dtype)

    def rows(self, ids: IntArray) -> Rows:
        """Rows of every head side by side, float32 [T, heads * width].

        ids: [T, heads of all modules], numbers within each module's own table.
        """
        parts = [
            table[ids[:, first:end]].reshape(len(ids), -1)
            for table, first, end in zip(
                self._tables, self._edges, self._edges[1:], strict=False
            )
        ]
        found = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        if self._dtype is DType.BFLOAT16:  # the upper half of a float32
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found.astype(np.float32, copy=False)


def _mapped(path: Path, entry: NgramFile) -> list[NDArray[Any]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: Mapping[str, Any] = json.loads(file.read(size))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Rows of a hash lie anywhere: reading ahead of one would fetch what no token asks for.
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    tables: list[NDArray[Any]] = []
    for name, rows in zip(entry.tensors, entry.rows, strict=True):
        held = header.get(name, {})
        got = (held.get("dtype"), held.get("shape"))
        wanted = (_FORMS.get(entry.dtype), [rows, entry.width])
        if got != wanted:
            raise ContractError(
                f"{path}: {name} has type and shape {got}, the manifest says {wanted}; export again"
            )
        start = 8 + size + held["data_offsets"][0]
        values = np.frombuffer(mapped, entry.dtype.numpy, rows * entry.width, start)
        tables.append(values.reshape(rows, entry.width))
    return tables
