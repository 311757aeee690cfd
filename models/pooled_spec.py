"""What the planner of pooled keys must know of a family, and the dimensions that follow from it.

Grouping, pooling rule, row parts, liveness and query source are choices of the family; the planner
reads grouping and sizes only, the builder the rest. Pure arithmetic; no family is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cachegraph.models.buckets import Bucket
from cachegraph.models.errors import ConfigError


class Grouping(StrEnum):
    """Which tokens of a sequence form a pool."""

    ORDER = (
        "order"  # k tokens that follow each other in the sequence, whatever their positions
    )
    POSITION = "position"  # k consecutive positions, counted from the sequence's first one


class Pooling(StrEnum):
    """How the keys of a pool become one."""

    MEAN = "mean"  # mean, norm, then rotation at the first member
    GATED = "gated"  # softmax over the members of a learned gate, for each channel


class Liveness(StrEnum):
    """How a graph tells a chosen pool that a token may see from one that fills a place."""

    SCORE = "score"  # scores of visible pools are never negative
    COUNT = "count"  # chosen pools are sorted, and as many are live as the token sees


class QuerySource(StrEnum):
    """What the indexer's queries are projected from."""

    HIDDEN = "hidden"  # the layer's input
    LATENT = "latent"  # the low-rank query of latent attention


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledSpec:
    """One plan of pooled keys, serving every indexed layer.

    pool: k, tokens of a pool. budget: tokens that the chosen pools of one query hold, a multiple of
    k. tail: a query also reads the tokens after its last complete pool. row_parts: raw values of an
    indexer row, such as (key,) or (key, gate). has_places: a token has three positions, t, y and x.
    cells: rows of a stream; sequences: that the cache has.
    """

    pool: int
    budget: int
    grouping: Grouping
    pooling: Pooling
    liveness: Liveness
    queries: QuerySource
    row_parts: tuple[str, ...] = ("key",)
    tail: bool = True
    has_places: bool = False
    cells: int = 1
    sequences: int = 1

    def __post_init__(self) -> None:
        if self.pool < 2 or self.budget < self.pool or self.budget % self.pool:
            raise ConfigError(
                f"pools of {self.pool} tokens with a budget of {self.budget}: a pool has 2 tokens "
                "or more, a budget is a multiple of it"
            )

    @property
    def top_pools(self) -> int:
        """Pools that one query keeps."""
        return self.budget // self.pool

    @property
    def tail_rows(self) -> int:
        """Most tokens after the last complete pool that a query reads."""
        return self.pool - 1 if self.tail else 0

    @property
    def selected(self) -> int:
        """Most tokens that one query attends to: K."""
        return self.budget + self.tail_rows


def cache_pools(pool: int, cells: int, sequences: int) -> int:
    """Pools that all sequences together can have when a stream has so many cells."""
    return cells // pool * sequences


def new_pools(pool: int, tokens: int, sequences: int, limit: int) -> int:
    """Pools that a step without edits can complete, at most `limit`, and at least 1.

    It does not change from one decode step to the next, so that their graph keeps one shape.
    """
    return max(1, min(tokens // pool + sequences, limit))


def pooled_dims(spec: PooledSpec, bucket: Bucket) -> dict[str, int]:
    """The dimensions of a call that the pooled plan adds; `pooled_formulas` says them in words.

    The bucket's context rung counts pools of one stream; its `repooled` are made anew beside those
    that a step completes.
    """
    limit = cache_pools(spec.pool, spec.cells, spec.sequences)
    made = new_pools(spec.pool, bucket.tokens, bucket.streams, limit)
    return {
        "NG": bucket.context,
        "MG": bucket.context * spec.pool,
        "BG": min(made + bucket.repooled, max(limit, 1)),
    }


def pooled_formulas(spec: PooledSpec) -> dict[str, str]:
    """What each dimension of `pooled_dims` is."""
    return {
        "NG": "pools exposed per stream: N",
        "MG": f"members of these pools: N*{spec.pool}",
        "BG": f"pools made anew: T div {spec.pool} + S and those of edits, at most those of the "
        "cache, at least 1",
    }
