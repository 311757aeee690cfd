"""What the planners of a bundle must know, and the dimensions of a call that follow from it.

A manifest carries these specs; a runtime plans and sizes every call from them alone, without
knowing the family. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from cachegraph.models.buckets import Bucket
from cachegraph.models.contract import CacheKind
from cachegraph.models.errors import ContractError
from cachegraph.models.key_rotation import KeyRotation
from cachegraph.models.ngram_spec import NgramSpec
from cachegraph.models.pooled_spec import PooledSpec, pooled_dims, pooled_formulas
from cachegraph.models.recurrent_spec import RecurrentSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSpec:
    """Sliding-window rows: a token at position p sees positions p - window + 1 .. p.

    pinned: the first positions, which every later token sees too.
    """

    window: int
    pinned: int = 0

    def __post_init__(self) -> None:
        """ContractError for sizes that no bundle has."""
        if self.window < 1:
            raise ContractError(f"the raw window is {self.window} rows, wanted 1 or more")
        if self.pinned < 0:
            raise ContractError(f"{self.pinned} raw rows are pinned, wanted 0 or more")

    def oldest_needed(self, position: int) -> int:
        """The first position behind the pinned ones that a token at `position` sees, or its own.

        The pinned ones are seen as well.
        """
        return max(min(self.pinned, position), position - self.window + 1)

    @property
    def rows_before_step(self) -> int:
        """Most rows that a stream reads beside as many as its step has tokens."""
        return self.pinned + self.window


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorSpec:
    """One compressor plan, which may serve the caches of several kinds alike.

    kind: the compressed rows, which name the plan. serves: every compressed kind written by this
    plan, with its state ring. ratio: tokens per row. overlap: a window reaches back one block.
    rewind: tokens that can be taken back, for whose rows the ring has room beyond a window.
    """

    kind: CacheKind
    serves: tuple[tuple[CacheKind, CacheKind], ...]
    ratio: int
    overlap: bool
    rewind: int

    def __post_init__(self) -> None:
        """ContractError for sizes that no bundle has."""
        name = f"the {self.kind.value} plan"
        if self.ratio < 1:
            raise ContractError(f"{name} has a ratio of {self.ratio} tokens, wanted 1 or more")
        if self.rewind < 0:
            raise ContractError(
                f"{name} has a rewind of {self.rewind} tokens, wanted 0 or more"
            )
        if self.kind not in dict(self.serves):
            raise ContractError(f"{name} serves no cache of its kind")

    @property
    def suffix(self) -> str:
        """Letter of the kind in dimension names: C for csa, H for hca."""
        return self.kind.value[0].upper()

    @property
    def window(self) -> int:
        """Rows of a closing window: 2R with overlap, else R."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def ring_rows(self) -> int:
        """Rows of the state ring of one sequence."""
        return self.window + self.rewind

    def oldest_needed(self, position: int) -> int:
        """The first position whose state row a sequence of that length still needs.

        Its open block starts at the last multiple of the ratio; with overlap the block before it
        counts too.
        """
        block = position // self.ratio - (1 if self.overlap else 0)
        return max(0, block * self.ratio)

    def carried(self, streams: int) -> int:
        """State rows that closing windows of so many streams may need, sentinels included.

        Every window reaches back less than its length before the step's first token; each sentinel
        takes one row.
        """
        return streams * self.window + (2 if self.overlap else 1)

    def blocks(self, step: int) -> int:
        """Most blocks that `step` consecutive tokens can close."""
        return ceil(step / self.ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerSpecs:
    """The planners of a bundle; those that it does not name are not needed.

    context_unit: tokens per row of the context rung N. ngrams: one for each module. keys: how
    attention keys are rotated, where a host may turn them.
    """

    raw: RawSpec | None = None
    compressors: tuple[CompressorSpec, ...] = ()
    pooled: PooledSpec | None = None
    recurrent: RecurrentSpec | None = None
    ngrams: tuple[NgramSpec, ...] = ()
    keys: KeyRotation | None = None
    context_unit: int

    def __post_init__(self) -> None:
        """ContractError for a context rung without tokens."""
        if self.context_unit < 1:
            raise ContractError(
                f"a row of the context rung is {self.context_unit} tokens, wanted 1 or more"
            )

    @property
    def raw_rows(self) -> RawSpec:
        """The raw rows; ContractError for a bundle without any."""
        if self.raw is None:
            raise ContractError("this bundle has no raw rows; it belongs to another family")
        return self.raw

    def exposed(self, spec: CompressorSpec, context: int) -> int:
        """Rows of a compressor exposed when the context rung is `context`."""
        return ceil(context * self.context_unit / spec.ratio)

    def context_rows(self, spec: CompressorSpec, visible: int) -> int:
        """The smallest context rung that exposes `visible` (1 or more) rows of a compressor."""
        return (visible - 1) * spec.ratio // self.context_unit + 1


def dims(specs: PlannerSpecs, bucket: Bucket) -> dict[str, int]:
    """Every dimension of one call by name; `formulas` says the same in words."""
    s, p = bucket.streams, bucket.step
    sizes = {"S": s, "P": p, "T": s * p, "O": bucket.out_rows}
    if specs.raw is not None:
        sizes["W"] = specs.raw.rows_before_step + p
    for spec in specs.compressors:
        closes = spec.kind in bucket.closes
        sizes["N" + spec.suffix] = specs.exposed(spec, bucket.context)
        sizes["B" + spec.suffix] = s * spec.blocks(p) if closes else 0
        sizes["A" + spec.suffix] = spec.carried(s) if closes else 0
        sizes["K" + spec.suffix] = s * min(p, spec.ring_rows)
    if specs.pooled is not None:
        sizes |= pooled_dims(specs.pooled, bucket)
    if specs.recurrent is not None:
        sizes["KR"] = specs.recurrent.kept(p)
    return sizes


def formulas(specs: PlannerSpecs) -> dict[str, str]:
    """What each dimension is, for people and for hosts in other languages."""
    words = {
        "S": "streams",
        "P": "tokens per stream",
        "T": "S*P tokens, stream-major",
        "O": "rows whose logits are computed: S, or T",
    }
    if specs.raw is not None:
        words["W"] = f"raw rows read per stream: {specs.raw.rows_before_step} + P"
    for c in specs.compressors:
        unit, ratio, name = specs.context_unit, c.ratio, c.kind.value
        words["N" + c.suffix] = f"{name} rows exposed per stream: ceil(N*{unit}/{ratio})"
        words["B" + c.suffix] = f"{name} blocks that may close: S*ceil(P/{ratio}), or 0"
        words["A" + c.suffix] = f"{name} state rows carried: {_carried_words(c)}, or 0"
        words["K" + c.suffix] = f"{name} state rows persisted: S*min(P, {c.ring_rows})"
    if specs.pooled is not None:
        words |= pooled_formulas(specs.pooled)
    if specs.recurrent is not None:
        words["KR"] = f"states kept of each stream: min(P, {specs.recurrent.rows})"
    return words


def _carried_words(spec: CompressorSpec) -> str:
    return f"S*{spec.window} + {2 if spec.overlap else 1}"


def spec_of(specs: Sequence[CompressorSpec], kind: CacheKind) -> CompressorSpec:
    """The compressor whose plan serves a compressed kind."""
    return next(s for s in specs if any(kind is served for served, _ in s.serves))
