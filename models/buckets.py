"""Buckets: the padded sizes of one graph call, and the ladder they are picked from.

Three sizes are chosen (S streams, P tokens per stream, N compressed rows exposed) and two switches
(which compressors may close a block, whether all rows want logits); everything else follows by the
`dims` of the family. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise, product

from cachegraph.models.contract import CacheKind
from cachegraph.models.errors import CapacityError, ContractError


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Bucket:
    """The padded sizes of one call.

    `closes` names the compressed cache kinds that may close a block in the call; the block lists of
    the others have length 0. `all_rows` asks for logits of all S*P rows instead of one per stream.
    `repooled`: pools made anew after an edit, beside those that the tokens complete.
    """

    streams: int
    step: int
    context: int
    closes: tuple[CacheKind, ...] = ()
    all_rows: bool = False
    repooled: int = 0

    @property
    def tokens(self) -> int:
        """T = S * P."""
        return self.streams * self.step

    @property
    def out_rows(self) -> int:
        """O: rows whose logits are computed."""
        return self.tokens if self.all_rows else self.streams

    @property
    def name(self) -> str:
        """File-name form, such as s1_p64_n512_csa_hca."""
        closes = "".join(f"_{kind.value}" for kind in self.closes)
        rows = "_all" if self.all_rows else ""
        edits = f"_r{self.repooled}" if self.repooled else ""
        return f"s{self.streams}_p{self.step}_n{self.context}{closes}{rows}{edits}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketLadder:
    """The rungs that a call is padded up to, each ascending."""

    streams: tuple[int, ...]
    steps: tuple[int, ...]
    contexts: tuple[int, ...]

    def __post_init__(self) -> None:
        """ContractError for rungs that are none: no step would end, or find its bucket."""
        for field in fields(self):
            rungs = getattr(self, field.name)
            if not rungs or any(low >= high for low, high in pairwise((0, *rungs))):
                raise ContractError(
                    f"the rungs of {field.name} are {rungs}, wanted one or more, ascending from 1"
                )

    def pick(
        self,
        *,
        streams: int,
        step: int,
        context: int,
        closes: tuple[CacheKind, ...] = (),
        all_rows: bool = False,
        repooled: int = 0,
    ) -> Bucket:
        """The smallest bucket that fits; CapacityError where none does.

        Pools made anew beyond those of the tokens come in powers of two, so that few sizes occur.
        """
        return Bucket(
            streams=_rung("streams", self.streams, streams),
            step=_rung("tokens per stream", self.steps, step),
            context=_rung("compressed rows", self.contexts, context),
            closes=closes,
            all_rows=all_rows,
            repooled=doubling(1, repooled)[-1] if repooled else 0,
        )

    def sizes(self) -> Iterator[tuple[int, int, int]]:
        """Every (S, P, N) of the ladder."""
        return product(self.streams, self.steps, self.contexts)


def _rung(what: str, rungs: tuple[int, ...], wanted: int) -> int:
    for rung in rungs:
        if rung >= wanted:
            return rung
    raise CapacityError(
        f"no bucket holds {wanted} {what}; the ladder ends at {rungs[-1]}; "
        "export with a larger size or send less in one step"
    )


def doubling(first: int, limit: int) -> tuple[int, ...]:
    """first, 2*first, ... up to the first value not below limit."""
    rungs = [first]
    while rungs[-1] < limit:
        rungs.append(rungs[-1] * 2)
    return tuple(rungs)


def capped_doubling(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... and limit itself last."""
    return (*(r for r in doubling(1, limit) if r < limit), limit)
