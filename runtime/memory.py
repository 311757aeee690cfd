"""What an engine holds: cache buffers with their sentinels, and the report of all its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.cache_types import CacheType, type_of
from cachegraph.models.contract import CARRIED, CacheKind, CachePart, CacheSpec, Contract
from cachegraph.models.errors import CapacityError
from cachegraph.models.manifest import DraftEntry
from cachegraph.models.plan_fields import NO_PREVIOUS
from cachegraph.runtime.binding import no_memory
from cachegraph.runtime.checkpoint_book import Mode

_HOST = "cpu"
_Key = TypeVar("_Key", bound=str)


def initial_cache(spec: CacheSpec) -> NDArray[Any]:
    """A zeroed cache with its sentinel rows: everything that may be read is finite or -inf by rule.

    The `no previous window` row has kv 0 in its first half and score -inf in its second.
    """
    try:
        cache = np.zeros(spec.shape, spec.dtype.numpy)
    except MemoryError as error:
        raise no_memory(spec) from error
    if NO_PREVIOUS in spec.layout.sentinels:
        cache[spec.layout.sentinel(NO_PREVIOUS), spec.width // 2 :] = -np.inf
    return cache


def initial_caches(contract: Contract) -> dict[str, NDArray[Any]]:
    """Every cache by name. Zero pages cost no memory until they are written."""
    return {spec.name: initial_cache(spec) for spec in contract.caches}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Bytes of all caches and checkpoint copies; known before anything is allocated.

    by_layer: bytes of each layer's caches by kind, for all streams. spare: bytes of sentinel and
    spare rows, which are part of the others. rows: live rows of one sequence by kind, and the type
    they are held in. devices: where the caches of each layer live.
    copies_by_layer: bytes of the prepared checkpoint by kind of copy (base, delta, shadow, host).
    """

    by_layer: Mapping[int, Mapping[CacheKind, int]]
    spare: int
    rows: Mapping[CacheKind, tuple[int, CacheType]]
    streams: int
    devices: Mapping[int, str]
    copies_by_layer: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    @property
    def by_kind(self) -> dict[CacheKind, int]:
        """Bytes by cache kind, over all layers."""
        return _totals(self.by_layer)

    @property
    def copies(self) -> dict[str, int]:
        """Bytes by kind of copy, over all layers."""
        return _totals(self.copies_by_layer)

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.by_kind.values()) + sum(self.copies.values())

    def breakdown(self) -> dict[str, dict[str, int]]:
        """Bytes by device, then by cache kind and kind of checkpoint copy.

        Copies live on the device of the state they copy, but for those of mode `host` and the
        streams that a drafter carries.
        """
        found: dict[str, dict[str, int]] = {}
        for layer, kinds in self.by_layer.items():
            own = found.setdefault(self.devices[layer], {})
            for kind, size in kinds.items():
                own[kind.value] = own.get(kind.value, 0) + size
        for layer, copies in self.copies_by_layer.items():
            for copy, size in copies.items():
                where = _HOST if copy in (Mode.HOST, CARRIED) else self.devices[layer]
                own = found.setdefault(where, {})
                own[copy] = own.get(copy, 0) + size
        return found

    def line(self) -> str:
        """One line for a log: rows and types by kind, total, streams."""
        parts = (
            f"{kind.value} {n} rows {form.value}" for kind, (n, form) in self.rows.items()
        )
        return (
            f"caches: {', '.join(parts)} a stream; {self.total / 2**20:.1f} MiB in all, "
            f"{self.streams} streams"
        )

    def check_budget(self, budget: int) -> None:
        """CapacityError, with what takes the most, where the caches need more than `budget`."""
        if self.total <= budget:
            return
        kind, size = max(self.by_kind.items(), key=lambda item: item[1])
        raise CapacityError(
            f"the caches need {self.total} bytes for {self.streams} sequences, the budget is "
            f"{budget}; {kind.value} rows take {size} of them; export with less --context or "
            "fewer --sequences"
        )


def memory_report(
    contract: Contract,
    devices: Mapping[int, str] | None = None,
    copies: Mapping[int, Mapping[str, int]] | None = None,
    draft: DraftEntry | None = None,
) -> MemoryReport:
    """What a contract's caches take, beside the copies of a checkpoint.

    devices: where a layer's caches live, cpu where it names none. copies: by layer.
    draft: the draft graph, where it is open; its raw rows and carried streams are counted too.
    """
    by_layer: dict[int, dict[CacheKind, int]] = {}
    rows: dict[CacheKind, tuple[int, CacheType]] = {}
    spare = 0
    caches, copied = contract.caches, dict(copies or {})
    streams = max((spec.layout.streams for spec in caches), default=0)
    if draft is not None:
        caches += draft.contract.caches
        layer = draft.contract.caches[0].layer
        copied[layer] = {CARRIED: draft.hidden.num_bytes * streams}
    for spec in caches:
        kinds = by_layer.setdefault(spec.layer, {})
        kinds[spec.kind] = kinds.get(spec.kind, 0) + spec.num_bytes
        if spec.part is CachePart.VALUES:
            rows[spec.kind] = (spec.layout.rows_per_stream, type_of(spec.dtype))
        idle = spec.layout.rows - spec.layout.live_rows
        spare += idle * spec.width * spec.dtype.itemsize
    return MemoryReport(
        by_layer=by_layer,
        spare=spare,
        rows=rows,
        streams=streams,
        devices={layer: (devices or {}).get(layer, _HOST) for layer in by_layer},
        copies_by_layer=copied,
    )


def _totals(by_layer: Mapping[int, Mapping[_Key, int]]) -> dict[_Key, int]:
    totals: dict[_Key, int] = {}
    for sizes in by_layer.values():
        for key, size in sizes.items():
            totals[key] = totals.get(key, 0) + size
    return totals
