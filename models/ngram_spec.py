"""Hashed n-gram ids: the constants of a family's tables, from its config alone.

The formulas are those of the published checkpoints, whose buffers hold the same numbers. Pure
integers: products stay below 2^63, so that signed and unsigned arithmetic agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

from cachegraph.models.contract import DType, Padding, Planner, Role, TensorRow
from cachegraph.models.errors import ConfigError
from cachegraph.models.plan_fields import PlanInput, plan_rows

_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_MODULE_STEP = 10007  # between the seeds of two modules


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramSpec:
    """The hash of one module.

    multipliers: [n], one for each token of an n-gram, newest first. primes, offsets: one for each
    head, heads of 2-grams first. end: the id that stands for tokens before the start or an end.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int

    def __post_init__(self) -> None:
        heads, orders = len(self.primes), len(self.multipliers) - 1
        if orders < 1 or not heads or heads % orders or len(self.offsets) != heads:
            raise ConfigError(
                f"n-gram hash of {len(self.multipliers)} multipliers, {heads} primes and "
                f"{len(self.offsets)} offsets: there are as many primes as offsets, and as many of "
                "each order from 2 on"
            )

    @property
    def history(self) -> int:
        """Earlier tokens that an id depends on: n - 1."""
        return len(self.multipliers) - 1

    @property
    def heads_per_order(self) -> int:
        """Heads of each n-gram order."""
        return len(self.primes) // self.history

    @property
    def table_rows(self) -> int:
        """Rows that ids address."""
        return self.offsets[-1] + self.primes[-1]


def ngram_spec(
    *, size: int, heads: int, base: int, vocab: int, seed: int, module: int, end: int
) -> NgramSpec:
    """The hash of module number `module`: n-grams up to `size`, `heads` for each order.

    base: the smallest prime is not below it. vocab: token ids.
    """
    total = heads * (size - 1)
    primes = tuple(islice(_primes(base), module * total, (module + 1) * total))
    offsets = tuple(sum(primes[:head]) for head in range(total))
    first = seed + _MODULE_STEP * module
    half = max(1, (2**63 - 1) // vocab // 2)
    multipliers = tuple(
        2 * (_split_mix(first + _GOLDEN * (i + 1)) % half) + 1 for i in range(size)
    )
    return NgramSpec(multipliers=multipliers, primes=primes, offsets=offsets, end=end)


def _split_mix(state: int) -> int:
    """One number of the splitmix64 generator in the given state."""
    word = (state + _GOLDEN) % _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % _WORD
    return word ^ word >> 31


def _primes(start: int) -> filter[int]:
    return filter(_is_prime, count(start))


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True


IDS = "plan.ngram.ids"
ROWS = "ngram_rows"


def ngram_rows(specs: Sequence[NgramSpec], width: int | None) -> tuple[TensorRow, ...]:
    """The contract row of hashed n-grams: table rows of every module's heads, in turn.

    width: where the host looks the tables up, values of all heads of a token; None where the graph
    holds them and takes the numbers of the rows.
    """
    if width is None:
        heads = sum(len(spec.primes) for spec in specs)
        ids = PlanInput(("T", heads), Padding.ZERO, "n-gram table row of each head")
        return plan_rows(Planner.NGRAM, lambda field: IDS, ("ids",), (ids,))
    row = TensorRow(
        name=ROWS,
        dtype=DType.FLOAT32,
        shape=("T", width),
        role=Role.TABLE,
        planner=Planner.NGRAM,
        padding=Padding.ZERO,
        meaning="n-gram table rows of each head, looked up by the host",
    )
    return (row,)
