"""Copies of state rows, and moving them: the memory of a checkpoint.

Rows and token numbers come from `checkpoint_book.py`. A base is a copy of whole rings; a delta is
one row for each token of each stream. Both live on the device of the rings, unless the copy is a
host copy. Nothing moves before everything was checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.contract import CacheKind, CacheSpec, Contract, DType
from cachegraph.models.errors import CapacityError, ContractError
from cachegraph.models.planner_specs import CompressorSpec
from cachegraph.runtime.binding import Buffer
from cachegraph.runtime.checkpoint_book import Mode

Rows = NDArray[Any]


class RowMover(Protocol):
    """The part of a binder that checkpoints use."""

    def beside(self, buffer: Buffer) -> RowMover:
        """The device of a cache buffer."""

    def cache(self, initial: Rows, dtype: DType) -> Buffer:
        """A buffer on the device."""

    def read_rows(self, buffer: Buffer, rows: Rows) -> Rows:
        """A copy of rows in host memory."""

    def write_rows(self, buffer: Buffer, rows: Rows, values: Rows) -> None:
        """Overwrite rows from host memory."""

    def move_rows(self, source: Buffer, rows: Rows, target: Buffer, places: Rows) -> None:
        """Copy rows of one buffer over rows of another on the device."""


def state_kinds(compressors: Iterable[CompressorSpec]) -> dict[CacheKind, int]:
    """Ring rows of a stream, by state cache kind."""
    return {state: spec.ring_rows for spec in compressors for _, state in spec.serves}


def copy_bytes(mode: Mode, max_tokens: int, states: Iterable[CacheSpec]) -> dict[str, int]:
    """Bytes that `StateCopies` takes, by kind of copy: base and delta, shadow or host."""
    if mode is Mode.RING:
        return {}
    base = delta = 0
    for spec in states:
        row = spec.width * spec.dtype.itemsize
        base += spec.layout.live_rows * row
        delta += spec.layout.streams * max_tokens * row
    return {"base": base, "delta": delta} if mode is Mode.DELTA else {mode.value: base}


class StateCopies:
    """Base and delta rows of every state cache, allocated once; none in mode ring."""

    def __init__(
        self,
        mode: Mode,
        max_tokens: int,
        kinds: Iterable[CacheKind],
        contract: Contract,
        binder: RowMover,
        caches: Mapping[str, Buffer],
    ) -> None:
        """CapacityError, with nothing kept, where memory cannot be had."""
        wanted = set(kinds) if mode is not Mode.RING else set()
        self._mode = mode
        self._max_tokens = max_tokens
        self._caches = caches
        self._specs = [spec for spec in contract.caches if spec.kind in wanted]
        self._host: dict[str, Rows] = {}
        self._base: dict[str, Buffer] = {}
        self._delta: dict[str, Buffer] = {}
        self._homes = {spec.name: binder.beside(caches[spec.name]) for spec in self._specs}
        for spec in self._specs:
            self._allocate(spec)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes by kind of copy: base, delta, shadow or host."""
        return copy_bytes(self._mode, self._max_tokens, self._specs)

    @property
    def by_layer(self) -> dict[int, dict[str, int]]:
        """The same of each layer's states."""
        layers: dict[int, list[CacheSpec]] = {}
        for spec in self._specs:
            layers.setdefault(spec.layer, []).append(spec)
        return {
            layer: copy_bytes(self._mode, self._max_tokens, specs)
            for layer, specs in layers.items()
        }

    def grow(self, max_tokens: int) -> None:
        """Make room for more tokens; what was recorded stays."""
        if self._mode is Mode.DELTA:
            grown = {spec.name: self._delta_rows(spec, max_tokens) for spec in self._specs}
            for spec in self._specs:
                old = np.arange(spec.layout.streams * self._max_tokens)
                new = old // self._max_tokens * max_tokens + old % self._max_tokens
                home = self._homes[spec.name]
                home.move_rows(self._delta[spec.name], old, grown[spec.name], new)
            self._delta = grown
        self._max_tokens = max_tokens

    def save(self) -> None:
        """Copy every ring, and nothing else."""
        for spec in self._specs:
            home, cache = self._homes[spec.name], self._caches[spec.name]
            rows = np.arange(spec.layout.live_rows)
            if self._mode is Mode.HOST:
                self._host[spec.name][...] = home.read_rows(cache, rows)
            else:
                home.move_rows(cache, rows, self._base[spec.name], rows)

    def record(self, stream: int, positions: Iterable[int], numbers: range) -> None:
        """Copy the ring rows of tokens. numbers: those of the tokens, counted from the save."""
        places = np.array(list(positions), np.int64)
        targets = stream * self._max_tokens + np.array(numbers, np.int64)
        for spec in self._specs:
            rows = spec.layout.base(stream) + places % spec.layout.rows_per_stream
            home, cache = self._homes[spec.name], self._caches[spec.name]
            home.move_rows(cache, rows, self._delta[spec.name], targets)

    def restore(self, stream: int, kept: Mapping[CacheKind, Mapping[int, int]]) -> None:
        """Put back the rings of a stream, then the rows of tokens: ring row -> token number.

        ContractError, with nothing moved, where a copy does not fit its ring.
        """
        moves = [self._moves(spec, stream, kept.get(spec.kind, {})) for spec in self._specs]
        for spec, rows, targets, sources in moves:
            home, cache = self._homes[spec.name], self._caches[spec.name]
            if self._mode is Mode.HOST:
                home.write_rows(cache, rows, self._host[spec.name][rows])
            else:
                home.move_rows(self._base[spec.name], rows, cache, rows)
            if targets.size:
                home.move_rows(self._delta[spec.name], sources, cache, targets)

    def _moves(
        self, spec: CacheSpec, stream: int, kept: Mapping[int, int]
    ) -> tuple[CacheSpec, Rows, Rows, Rows]:
        """Ring rows of a stream; of its tokens the ring rows and the delta rows. All in range."""
        size = spec.layout.rows_per_stream
        held = self._host if self._mode is Mode.HOST else self._base
        numbers = np.array(list(kept.values()), np.int64)
        offsets = np.array(list(kept), np.int64)
        if (
            spec.name not in held
            or not 0 <= stream < spec.layout.streams
            or ((offsets < 0) | (offsets >= size)).any()
            or ((numbers < 0) | (numbers >= self._max_tokens)).any()
        ):
            raise ContractError(
                f"{spec.name}: the checkpoint does not fit stream {stream}: ring rows "
                f"{offsets.tolist()} of {size}, tokens {numbers.tolist()} of {self._max_tokens}; "
                "nothing was restored"
            )
        rows = spec.layout.base(stream) + np.arange(size)
        return (
            spec,
            rows,
            spec.layout.base(stream) + offsets,
            stream * self._max_tokens + numbers,
        )

    def _allocate(self, spec: CacheSpec) -> None:
        rows = spec.layout.live_rows
        if self._mode is Mode.HOST:
            self._host[spec.name] = self._zeros(spec, rows)
        else:
            self._base[spec.name] = self._buffer(spec, rows)
        if self._mode is Mode.DELTA:
            self._delta[spec.name] = self._delta_rows(spec, self._max_tokens)

    def _delta_rows(self, spec: CacheSpec, max_tokens: int) -> Buffer:
        return self._buffer(spec, spec.layout.streams * max_tokens)

    def _buffer(self, spec: CacheSpec, rows: int) -> Buffer:
        try:
            return self._homes[spec.name].cache(self._zeros(spec, rows), spec.dtype)
        except MemoryError as error:
            raise self._no_memory(spec) from error

    def _zeros(self, spec: CacheSpec, rows: int) -> Rows:
        try:
            return np.zeros((rows, spec.width), spec.dtype.numpy)
        except MemoryError as error:
            raise self._no_memory(spec) from error

    def _no_memory(self, spec: CacheSpec) -> CapacityError:
        return CapacityError(
            f"no memory for a {self._mode.value} checkpoint of the {spec.kind.value} rows of "
            f"layer {spec.layer}; nothing has changed; use mode ring"
        )
