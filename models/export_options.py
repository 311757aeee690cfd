"""What a user chooses at export. Frozen and checked when made; written into the manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum

from cachegraph.models.cache_types import CacheType, CacheTypes
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import RowSharing
from cachegraph.models.errors import ConfigError
from cachegraph.models.stages import check_split


class Dialect(StrEnum):
    """Which operators the graphs may use."""

    PORTABLE = "portable"  # ai.onnx only
    ORT = "ort"  # com.microsoft too, where it is faster


class WeightType(StrEnum):
    """How big matrices are stored."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int | None:
        """Bits of a quantised weight; None for the float forms."""
        return {WeightType.INT8: 8, WeightType.INT4: 4}.get(self)


class Select(StrEnum):
    """How attention reads the rows that the indexer chose."""

    GATHER = "gather"  # the chosen rows of each token
    MASK = "mask"  # all exposed rows, the others masked


class Experts(StrEnum):
    """Which experts an expert layer computes."""

    CHOSEN = "chosen"
    ALL = "all"


class RowRead(StrEnum):
    """Lowering of whole-row reads of a cache."""

    ROWS = "rows"  # Gather on axis 0
    ELEMENTS = "elements"  # GatherElements, index as wide as the row
    ND = "nd"  # GatherND


class RowWrite(StrEnum):
    """Lowering of whole-row writes to a cache."""

    ND = "nd"  # ScatterND
    ELEMENTS = "elements"  # ScatterElements, index as wide as the row


class NgramPlace(StrEnum):
    """Where n-gram tables live, which only some families have."""

    AUTO = "auto"  # the host where one is above a gigabyte
    GRAPH = "graph"  # weights of the graph, on its device
    HOST = "host"  # a file of their own, of which the host reads the rows of each token


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Options of one bundle; ConfigError for a combination that no kernel runs."""

    dialect: Dialect = Dialect.PORTABLE
    weights: WeightType = WeightType.F32
    select: Select = Select.GATHER
    experts: Experts = Experts.CHOSEN
    gather: RowRead = RowRead.ROWS
    scatter: RowWrite = RowWrite.ND
    cache: CacheType = CacheType.F32
    index_cache: CacheType = CacheType.F32
    raw: RowSharing = RowSharing.PER_STREAM
    ngram: NgramPlace = NgramPlace.AUTO
    draft: bool = True  # the MTP block too, where the checkpoint has one
    split: tuple[int, ...] = ()  # layers of each stage; one graph where empty
    devices: tuple[str, ...] = ()  # where each stage runs unless the engine is told otherwise
    capacity: Capacity = field(default_factory=Capacity)

    def __post_init__(self) -> None:
        _ = self.cache_types  # refuses a type outside the list
        check_split(self.split, self.devices)
        if (
            self.dialect is Dialect.ORT
            and self.weights.bits is not None
            and self.experts is Experts.ALL
        ):
            raise ConfigError(
                "quantised experts of the ort dialect are one QMoE node, which computes the "
                "chosen experts only; use experts=chosen, or the portable dialect"
            )

    @property
    def cache_types(self) -> CacheTypes:
        """How cache rows are stored."""
        return CacheTypes(rows=self.cache, index=self.index_cache)

    def to_json(self) -> dict[str, object]:
        """Plain JSON types, for the manifest."""
        return asdict(self)
