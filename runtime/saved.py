"""Saved sequences: one safetensors file that continues as if it had never stopped.

Rows are stored by position, not by place, so that a file can be restored into another slot and into
an engine with another capacity. What must agree is the identity: weights, model constants, cache
widths and types. Every tensor and the description itself are hashed; a file is written whole or not
at all, and read and checked in full before a row changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from cachegraph.models.contract import CacheKind
from cachegraph.models.errors import StateFileError
from cachegraph.models.manifest import Manifest

FORMAT_VERSION = 1
_DESCRIPTION, _DIGEST = "cachegraph_state", "sha256"
_DIGEST_LENGTH = 64
_ORDER = ("I64", "F32", "U16", "F16", "I8")  # as safetensors orders tensors in a file
Rows = NDArray[Any]


class TensorSize(NamedTuple):
    """Type, as safetensors spells it, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, dtype: np.dtype[Any], shape: tuple[int, ...]) -> TensorSize:
        """From a numpy type."""
        return cls(f"{dtype.kind.upper()}{8 * dtype.itemsize}", shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * int(self.dtype[1:]) // 8


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Identity(_Part):
    """What a file and an engine must agree in. Never capacity, slot count or path.

    Compared in the order of the fields: what explains a difference comes before what follows from
    it.
    """

    family: str
    config: dict[str, Any]
    pinned: NonNegativeInt = 0
    caches: dict[str, tuple[int, str]]  # contract name -> width, dtype
    state_layout: Literal[1] = 1
    weights_sha256: str
    tables_sha256: str | None = None  # of n-gram tables in a file of their own


class SavedDraft(_Part):
    """What a drafter knew of a sequence; see `runtime.carried`.

    Streams are stored of positions first .. end - 1, raw rows of raw_first .. paired - 1.
    """

    first: NonNegativeInt
    end: NonNegativeInt
    paired: NonNegativeInt
    raw_first: NonNegativeInt


class SavedSequence(_Part):
    """One sequence. The token ids are a tensor; positions are 0 .. length - 1, or a tensor too.

    raw_first: first position behind the pinned ones whose raw row is stored; the rows of the
    pinned ones come before it. state_first: the same for the state rows of each compressor; both
    run to length - 1. Compressed and attention rows are stored from the first. depth: recurrent
    states are those after length - depth .. length tokens. draft: only where the engine
    drafted; without it drafts start anew after a restore. text: of a partial state only, which
    holds states alone: the digest of the tokens and positions that they belong to.
    """

    seq_id: NonNegativeInt
    length: NonNegativeInt
    raw_first: NonNegativeInt
    state_first: dict[CacheKind, NonNegativeInt]
    depth: NonNegativeInt = 0
    draft: SavedDraft | None = None
    text: str | None = None


class Description(_Part):
    """The JSON header of a file."""

    format_version: Literal[1] = 1
    identity: Identity
    sequences: tuple[SavedSequence, ...]
    tensors: dict[str, str]  # name -> sha256 of its type, shape and bytes


def identity_of(manifest: Manifest) -> Identity:
    """The identity of a bundle."""
    assert manifest.weights is not None
    tables = manifest.ngram_tables
    return Identity(
        family=manifest.family,
        weights_sha256=manifest.weights.sha256,
        tables_sha256=None if tables is None else tables.sha256,
        config=manifest.config,
        pinned=manifest.capacity.pinned,
        caches={c.name: (c.width, c.dtype.value) for c in manifest.caches},
    )


def tokens_name(seq_id: int) -> str:
    """Name of a sequence's token ids, int64 [length]."""
    return f"{seq_id}.tokens"


def places_name(seq_id: int) -> str:
    """Name of a sequence's positions, int64 [length, 3], where a token has three."""
    return f"{seq_id}.places"


def rows_name(seq_id: int, cache: str) -> str:
    """Name of a sequence's stored rows of one cache."""
    return f"{seq_id}.{cache}"


def pack(
    identity: Identity, sequences: Iterable[SavedSequence], tensors: Mapping[str, Rows]
) -> bytes:
    """Saved sequences as the bytes of one safetensors file."""
    digests = {name: _digest(values) for name, values in tensors.items()}
    return save(dict(tensors), metadata=_metadata(identity, sequences, digests))


def packed_size(
    identity: Identity, sequences: Iterable[SavedSequence], sizes: Mapping[str, TensorSize]
) -> int:
    """Bytes that `pack` gives for tensors of these sizes, without any of them at hand."""
    digests = dict.fromkeys(sizes, "0" * _DIGEST_LENGTH)
    header: dict[str, Any] = {"__metadata__": _metadata(identity, sequences, digests)}
    end = 0
    for name in sorted(sizes, key=lambda name: (_ORDER.index(sizes[name].dtype), name)):
        size = sizes[name]
        start, end = end, end + size.num_bytes
        shape, place = list(size.shape), [start, end]
        header[name] = {"dtype": size.dtype, "shape": shape, "data_offsets": place}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + -(-len(text) // 8) * 8 + end


def _metadata(
    identity: Identity, sequences: Iterable[SavedSequence], digests: Mapping[str, str]
) -> dict[str, str]:
    description = Description(
        identity=identity, sequences=tuple(sequences), tensors=dict(digests)
    )
    text = description.model_dump_json()
    return {_DESCRIPTION: text, _DIGEST: hashlib.sha256(text.encode()).hexdigest()}


def write_state(path: Path, data: bytes) -> None:
    """Write atomically: temporary file, fsync, rename. OSError leaves what was at `path`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    _sync_folder(path.parent)


def read_state(path: Path, identity: Identity) -> tuple[Description, dict[str, Rows]]:
    """Read and check a file in full; StateFileError names what is wrong or differs."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise StateFileError(f"{path} does not exist") from None
    except OSError as error:
        raise StateFileError(f"{path} cannot be read: {error.strerror}") from None
    return unpack(str(path), data, identity)


def unpack(where: str, data: bytes, identity: Identity) -> tuple[Description, dict[str, Rows]]:
    """Read and check the bytes of a state in full; StateFileError names what is wrong."""
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise StateFileError(f"{where} is damaged or no saved state: {error}") from None
    description = _description(where, data)
    _check_identity(where, description.identity, identity)
    for name, digest in description.tensors.items():
        fault = "missing" if name not in tensors else "damaged"
        if fault == "missing" or _digest(tensors[name]) != digest:
            raise StateFileError(
                f"{where}: tensor {name!r} is {fault}; save the sequence again"
            )
    if extra := set(tensors) - set(description.tensors):
        raise StateFileError(f"{where}: tensor {min(extra)!r} is not in its description")
    return description, tensors


def _description(where: str, data: bytes) -> Description:
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    text = metadata.get(_DESCRIPTION)
    if text is None:
        raise StateFileError(f"{where} is no state saved by cachegraph")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get(_DIGEST):
        raise StateFileError(f"{where}: its description is damaged; save the sequence again")
    version = json.loads(text).get("format_version")
    if version != FORMAT_VERSION:
        raise StateFileError(
            f"{where} has state format {version!r}; this cachegraph reads {FORMAT_VERSION}"
        )
    try:
        return Description.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise StateFileError(f"{where}: field {field!r}: {first['msg']}") from None


def _check_identity(where: str, saved: Identity, ours: Identity) -> None:
    for field in Identity.model_fields:
        theirs, mine = getattr(saved, field), getattr(ours, field)
        if theirs == mine:
            continue
        if isinstance(theirs, dict):
            keys = sorted(set(theirs) | set(mine))
            key = next(k for k in keys if theirs.get(k) != mine.get(k))
            field, theirs, mine = f"{field}.{key}", theirs.get(key), mine.get(key)
        raise StateFileError(
            f"{where} was saved by another bundle: {field} is {theirs!r} there and {mine!r} here; "
            "restore it into the bundle that saved it"
        )


def _digest(values: Rows) -> str:
    digest = hashlib.sha256(f"{values.dtype.str}{values.shape}".encode())
    digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system lets folders be synced."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
