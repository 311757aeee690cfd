"""A byte n-gram model, interpolated Kneser-Ney: the yardstick of the tiny models.

Training is counting, so it is exact and takes seconds. Files are padded in front with NUL
bytes; only real bytes are counted and scored. numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

MAX_ORDER = 7  # an n-gram is packed into one int64, 8 bits a byte
ALPHABET = 256

Keys = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderTable:
    """Counts of one order: sorted n-grams, and totals of their sorted contexts.

    `grams` [G] with `counts` [G]; `contexts` [C] with the sum of counts and the number of
    distinct next bytes of each, `totals` [C] and `types` [C]; `discount` is taken off every
    count.
    """

    grams: Keys
    counts: Keys
    contexts: Keys
    totals: Keys
    types: Keys
    discount: float

    def interpolate(self, keys: Keys, lower: NDArray[np.float64]) -> NDArray[np.float64]:
        """P of each n-gram's last byte given the rest, float64 [K].

        `lower` [K] is the same of the next lower order; it stands where the context is unknown.
        """
        counts = _lookup(self.grams, self.counts, keys)
        context = keys >> 8
        totals = _lookup(self.contexts, self.totals, context)
        types = _lookup(self.contexts, self.types, context)
        known = np.maximum(totals, 1)
        kept = np.maximum(counts - self.discount, 0.0) / known
        return np.where(totals > 0, kept + self.discount * types / known * lower, lower)


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramModel:
    """Tables of orders 1 .. n, lowest first."""

    tables: tuple[OrderTable, ...]

    @property
    def order(self) -> int:
        """n: the byte predicted and the n-1 before it."""
        return len(self.tables)

    def probabilities(self, data: bytes) -> NDArray[np.float64]:
        """P of each byte of one file given the bytes before it: float64 [len(data)]."""
        keys = pack(data, self.order)
        result = np.full(len(keys), 1.0 / ALPHABET)
        for length, table in enumerate(self.tables, start=1):
            result = table.interpolate(_suffix(keys, length), result)
        return result

    def bits(self, data: bytes) -> float:
        """Bits that the model spends on one file."""
        return float(-np.log(self.probabilities(data)).sum() / log(2))


def train(files: Iterable[bytes], order: int = 5) -> NgramModel:
    """Count a model of one order over whole files.

    The highest order keeps plain counts; each lower one counts after how many different bytes
    an n-gram was seen (Kneser-Ney). ValueError for an order outside 1 .. MAX_ORDER.
    """
    if not 1 <= order <= MAX_ORDER:
        raise ValueError(f"order is {order}; an n-gram packed into int64 has 1 to {MAX_ORDER}")
    packed = np.concatenate([pack(data, order) for data in files])
    grams, counts = np.unique(packed, return_counts=True)
    tables = [_table(grams, counts)]
    for length in range(order - 1, 0, -1):
        grams, counts = np.unique(_suffix(grams, length), return_counts=True)
        tables.append(_table(grams, counts))
    return NgramModel(tables=tuple(reversed(tables)))


def pack(data: bytes, order: int) -> Keys:
    """The n-gram that ends at each byte, first byte highest: int64 [len(data)]."""
    padded = np.frombuffer(bytes(order - 1) + data, np.uint8).astype(np.int64)
    keys = np.zeros(len(data), np.int64)
    for offset in range(order):
        keys = (keys << 8) | padded[offset : offset + len(data)]
    return keys


def _suffix(keys: Keys, length: int) -> Keys:
    return keys & ((1 << 8 * length) - 1)


def _table(grams: Keys, counts: Keys) -> OrderTable:
    contexts, starts = np.unique(grams >> 8, return_index=True)
    ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
    return OrderTable(
        grams=grams,
        counts=counts,
        contexts=contexts,
        totals=np.add.reduceat(counts, starts),
        types=np.diff(np.append(starts, len(grams))),
        discount=ones / (ones + 2 * twos) if ones else 0.5,
    )


def _lookup(keys: Keys, values: Keys, wanted: Keys) -> Keys:
    """values of the wanted keys, 0 where there is none; `keys` is sorted."""
    found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[found] == wanted, values[found], 0)
