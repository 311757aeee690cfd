"""The contract: one row for each graph input and output, one spec for each cache.

Names, dtypes, shapes, padding rules and the docs of a bundle are all derived from these rows; no
tensor name is typed anywhere else. A family builds its rows in `models/FAMILY/contract.py`.
Knows nothing of ONNX or of how plans are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cachegraph.models.errors import ContractError

Dim = int | str

# Results that a host asks for by name, whatever the family.
LOGITS = "logits"
EMBEDDINGS = "embeddings"
STREAMS = "streams"  # of every token: what a draft graph starts from
# An input: of a draft graph the streams of the position before each token, of a stage those of
# the stage before.
CARRIED = "carried"
OUT_ROWS = "out_rows"


class DType(StrEnum):
    """Element types of graph inputs, outputs and caches, spelled as numpy and ONNX spell them."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT64 = "int64"

    @property
    def numpy(self) -> np.dtype:
        """The numpy dtype of the same name; numpy has no bfloat16: its bits are held as uint16."""
        return np.dtype("uint16" if self is DType.BFLOAT16 else self.value)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize


class Role(StrEnum):
    """Who fills a tensor and when."""

    BATCH = "batch"  # tokens, positions, rows whose logits are wanted
    PLAN = "plan"  # index lists, written by a planner in every step
    CARRIED = "carried"  # rows of an earlier call's result, written by the host
    CACHE = "cache"  # a cache buffer, bound once as input and as output
    TABLE = "table"  # rows of a table that only the host holds, looked up in every step
    RESULT = "result"  # read by the host after the step


class Planner(StrEnum):
    """The planners a runtime needs for a bundle; a manifest lists them."""

    BATCH = "batch"
    RAW = "raw"
    COMPRESSOR = "compressor"
    POOLED = "pooled"
    RECURRENT = "recurrent"
    NGRAM = "ngram"


class Padding(StrEnum):
    """What the unused tail of a plan buffer holds. Every element is written in every step."""

    NONE = "none"  # has no tail
    ZERO = "zero"  # 0: a count, a position, or an entry that a count hides
    LAST = "last"  # repeats the last valid entry (of the same stream where there are streams)
    SPARE = (
        "spare"  # one spare row of the cache group each, so that scatter targets are unique
    )
    SENTINEL = "sentinel"  # the zero sentinel of the cache group, which is its last one


class CacheKind(StrEnum):
    """Cache groups. All caches of one kind share one row layout and one plan."""

    RAW = "raw"
    CSA = "csa"
    HCA = "hca"
    LID = "lid"
    CSA_STATE = "csa_state"
    LID_STATE = "lid_state"
    HCA_STATE = "hca_state"
    KEYS = "keys"  # of attention
    VALUES = "values"
    INDEX = "index"  # raw indexer keys
    POOLED = "pooled"  # a pool's key, in the row of its last member
    RECURRENT_STATE = "recurrent_state"
    CONV_STATE = "conv_state"
    NGRAM_STATE = "ngram_state"  # of the convolution over hashed n-grams

    @property
    def is_state(self) -> bool:
        """Whether rows hold what cannot be computed again from other rows; always f32."""
        return self.value.endswith("_state")

    @property
    def is_recurrent(self) -> bool:
        """Whether a row is the state of a sequence after so many tokens."""
        return self in _RECURRENT


_RECURRENT = (CacheKind.RECURRENT_STATE, CacheKind.CONV_STATE, CacheKind.NGRAM_STATE)
# Kinds whose rows may be unified, so that several sequences own one.
MAY_SHARE = (
    CacheKind.RAW,
    CacheKind.KEYS,
    CacheKind.VALUES,
    CacheKind.INDEX,
    CacheKind.POOLED,
)


class CachePart(StrEnum):
    """Buffers of one cache. Row i of every part belongs to row i of the cache."""

    VALUES = "values"
    SCALES = "scales"  # of a quantised cache: one for each block of a row


class RowSharing(StrEnum):
    """Who owns the rows of a cache kind."""

    PER_STREAM = "per_stream"  # each stream its own block
    UNIFIED = "unified"  # one pool: a row belongs to any number of sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """Rows of one cache kind: those of streams first, then sentinels, then spare rows.

    Stream s owns rows [s * rows_per_stream, (s + 1) * rows_per_stream); where these are unified,
    they are one pool of as many, and no stream has more than rows_per_stream of them. Sentinels
    have a fixed meaning and no owner; spare rows take padded writes and are never read.
    """

    rows_per_stream: int
    streams: int
    sentinels: tuple[str, ...] = ()
    spare_rows: int = 0
    sharing: RowSharing = RowSharing.PER_STREAM

    def __post_init__(self) -> None:
        """ContractError for sizes that no bundle has."""
        if self.rows_per_stream < 1:
            raise ContractError(f"a stream has {self.rows_per_stream} rows, wanted 1 or more")
        if self.streams < 1:
            raise ContractError(f"rows of {self.streams} streams, wanted 1 or more")
        if self.spare_rows < 0:
            raise ContractError(f"{self.spare_rows} spare rows, wanted 0 or more")

    @property
    def live_rows(self) -> int:
        """Rows that belong to streams."""
        return self.rows_per_stream * self.streams

    @property
    def spare_start(self) -> int:
        """First spare row."""
        return self.live_rows + len(self.sentinels)

    @property
    def rows(self) -> int:
        """All rows: live, sentinels and spare."""
        return self.spare_start + self.spare_rows

    def base(self, stream: int) -> int:
        """First row of a stream."""
        return stream * self.rows_per_stream

    @property
    def zero_sentinel(self) -> int:
        """Row of the last sentinel, which is all 0; ContractError if the layout has none."""
        if not self.sentinels:
            raise ContractError("padding asks for a sentinel, and this layout has none")
        return self.sentinel(self.sentinels[-1])

    def sentinel(self, name: str) -> int:
        """Row of a named sentinel; ContractError if the layout has none of that name."""
        if name not in self.sentinels:
            raise ContractError(f"no sentinel {name!r}; this layout has {self.sentinels}")
        return self.live_rows + self.sentinels.index(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """One cache buffer [rows, width] of one layer: a whole cache, or a part of a quantised one."""

    layer: int
    kind: CacheKind
    part: CachePart = CachePart.VALUES
    dtype: DType
    width: int
    layout: RowLayout

    @property
    def name(self) -> str:
        """Graph input; `out_name` is the output bound to the same buffer."""
        suffix = "" if self.part is CachePart.VALUES else f".{self.part.value}"
        return f"cache.{self.layer}.{self.kind.value}{suffix}"

    @property
    def out_name(self) -> str:
        """Graph output of the updated cache."""
        return f"{self.name}.out"

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, width]."""
        return self.layout.rows, self.width

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.layout.rows * self.width * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class CarriedSpec:
    """Rows [rows, width] of a result that the host keeps of each sequence, the newest ones."""

    rows: int
    width: int
    dtype: DType

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's rows."""
        return self.rows * self.width * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRow:
    """One graph input or output.

    `shape` mixes numbers and dimension names; `resolve` turns it into numbers for one bucket.
    `spare_of` names the cache kind whose spare rows or sentinels the padding rule means.
    """

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    role: Role
    planner: Planner | None = None
    padding: Padding = Padding.NONE
    spare_of: CacheKind | None = None
    is_output: bool = False
    meaning: str = ""

    def resolve(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """The numeric shape for one bucket's dims."""
        return tuple(d if isinstance(d, int) else dims[d] for d in self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """All rows of one graph template, in graph order, and its caches."""

    rows: tuple[TensorRow, ...]
    caches: tuple[CacheSpec, ...]

    def __getitem__(self, name: str) -> TensorRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise ContractError(f"no tensor {name!r} in the contract")

    @property
    def inputs(self) -> tuple[TensorRow, ...]:
        """Rows fed by the host and cache inputs, in graph order."""
        return tuple(r for r in self.rows if not r.is_output)

    @property
    def outputs(self) -> tuple[TensorRow, ...]:
        """Result rows and cache outputs, in graph order."""
        return tuple(r for r in self.rows if r.is_output)

    @property
    def host_rows(self) -> tuple[TensorRow, ...]:
        """Inputs that planners fill in every step, int64: batch and plan rows."""
        return tuple(r for r in self.inputs if r.role in (Role.BATCH, Role.PLAN))

    def layout(self, kind: CacheKind) -> RowLayout:
        """The row layout shared by all caches of a kind."""
        for cache in self.caches:
            if cache.kind is kind:
                return cache.layout
        raise ContractError(f"the model has no {kind.value} cache")

    def has(self, kind: CacheKind) -> bool:
        """Whether any layer has a cache of this kind."""
        return any(cache.kind is kind for cache in self.caches)


_NOUNS = {CachePart.VALUES: "rows", CachePart.SCALES: "scales"}


def cache_rows(caches: tuple[CacheSpec, ...]) -> tuple[TensorRow, ...]:
    """The input and output rows of every cache, inputs first."""
    sides = [(c, is_output) for is_output in (False, True) for c in caches]
    return tuple(
        TensorRow(
            name=cache.out_name if is_output else cache.name,
            dtype=cache.dtype,
            shape=cache.shape,
            role=Role.CACHE,
            is_output=is_output,
            meaning=f"{cache.kind.value} {_NOUNS[cache.part]} of layer {cache.layer}, "
            "updated in place",
        )
        for cache, is_output in sides
    )
