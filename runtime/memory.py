"""What an engine holds: cache buffers with their sentinels, and the report of their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.contract import CacheKind, CacheSpec, Contract
from cachegraph.models.plan_fields import NO_PREVIOUS
from cachegraph.runtime.binding import no_memory


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
    """Bytes of all caches, by kind and in total, for the streams of the bundle."""

    by_kind: Mapping[CacheKind, int]
    streams: int

    @property
    def total(self) -> int:
        """All cache bytes."""
        return sum(self.by_kind.values())


def memory_report(contract: Contract) -> MemoryReport:
    """What a contract's caches take, known before anything is allocated."""
    by_kind: dict[CacheKind, int] = {}
    for spec in contract.caches:
        by_kind[spec.kind] = by_kind.get(spec.kind, 0) + spec.num_bytes
    streams = max((spec.layout.streams for spec in contract.caches), default=0)
    return MemoryReport(by_kind=by_kind, streams=streams)
