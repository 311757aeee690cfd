"""Sampling: from one row of logits to one token id.

Owns the options, the filters, the random stream of a sequence and log-probabilities. Knows
nothing of text, of batches or of graphs, and leaves the rule for drafts to `speculative`. A row
that offers no token is an error, never an id.

The steps run in this order, each on what the one before left, renormalised:
repetition penalty, temperature, top-k, softmax, min-p, top-p, one draw.

- The penalty is first, because it acts on the sign and size of raw logits.
- Temperature comes before the filters, so that min-p and top-p measure the distribution that
  is drawn from. Top-k does not care (temperature keeps the order), and being a count it needs
  no probabilities, so it goes ahead of the softmax and makes everything after it small.
- min-p before top-p: it drops the noise relative to the best token, then top-p shares out the
  mass of what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.errors import BatchError, ConfigError, ContractError, LogitsError
from cachegraph.runtime.distribution import Distribution, Floats, Ids
from cachegraph.runtime.speculative import Draft, settle

Logits = NDArray[np.floating[Any]]

_FIRST_NUCLEUS = 64  # candidates sorted before top-p looks further


class _Rule(NamedTuple):
    kind: type
    holds: Callable[[Any], bool]
    wanted: str


_RULES = {
    "temperature": _Rule(Real, lambda v: 0 <= v < math.inf, "a number of 0 or more"),
    "top_k": _Rule(Integral, lambda v: v >= 0, "a whole number of 0 or more (0 is off)"),
    "top_p": _Rule(Real, lambda v: 0 < v <= 1, "above 0 and at most 1 (1 is off)"),
    "min_p": _Rule(Real, lambda v: 0 <= v <= 1, "from 0 to 1 (0 is off)"),
    "repetition_penalty": _Rule(Real, lambda v: 0 < v < math.inf, "above 0 (1 is off)"),
    "seed": _Rule(Integral, lambda v: v >= 0, "a whole number of 0 or more, or None"),
    "logprobs": _Rule(Integral, lambda v: v >= 0, "a whole number of 0 or more, or None"),
}
_OPTIONAL = ("seed", "logprobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How tokens are chosen; checked when made, ConfigError lists every fault.

    temperature 0 is greedy: the highest logit, the lower id on ties; the filters and the seed
    then do nothing, the penalty still does. logprobs None returns no log-probabilities, 0 that
    of the chosen token, n also the n best. seed None draws a fresh seed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        faults = []
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not (isinstance(value, rule.kind) and rule.holds(value)):
                faults.append(f"{name} is {value!r}; it must be {rule.wanted}")
        if faults:
            raise ConfigError("sampling options: " + "; ".join(faults))

    @property
    def is_greedy(self) -> bool:
        """Whether chance plays no part."""
        return self.temperature == 0


class TokenLogprob(NamedTuple):
    """A token id and the natural logarithm of its probability."""

    token: int
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One chosen token.

    logprob and top are of the raw distribution, softmax(logits), before penalty, temperature
    and filters: they say what the model thought, whatever was done to it. top is best first
    and leaves out masked tokens. Both are empty unless the options ask for log-probabilities.
    """

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Sampler:
    """Chooses the tokens of one sequence.

    Each sequence has a sampler of its own; `stream` is its number among those that share a
    seed (the prompt's place in the batch). Its random numbers depend on seed and stream alone,
    and each drawn token takes exactly one of them, so neither neighbours nor filters that
    remove nothing change a text. A drafted token takes one, and what `speculative` asks for.
    """

    def __init__(self, options: SamplingOptions, vocab_size: int, *, stream: int = 0) -> None:
        entropy = np.random.SeedSequence(options.seed, spawn_key=(stream,))
        self._options = options
        self._vocab_size = vocab_size
        self._rng = np.random.Generator(np.random.PCG64(entropy))

    def sample(
        self, logits: Logits, history: Sequence[int] | Ids = (), draft: Draft | None = None
    ) -> Choice:
        """The token that follows `history` (ids seen so far, any order), from logits [V].

        A draft of this position is kept or replaced so that the token is distributed as it would
        be without. The row is not changed. Errors as of `distribution`.
        """
        law = self.distribution(logits, history)
        token = self._draw(law) if draft is None else settle(draft, law, self._rng.random)
        if self._options.logprobs is None:
            return Choice(token=token)
        return _with_logprobs(token, logits.astype(np.float64), self._options.logprobs)

    def draft(self, logits: Logits, history: Sequence[int] | Ids = ()) -> Draft:
        """A token drawn from a draft's logits [V], with what `sample` needs to judge it."""
        law = self.distribution(logits, history)
        return Draft(token=self._draw(law), law=law)

    def distribution(self, logits: Logits, history: Sequence[int] | Ids = ()) -> Distribution:
        """What is drawn from: the row [V] after penalty, temperature and filters.

        One token where the options are greedy. Raises LogitsError for a row with NaN or +inf, or
        all -inf; ContractError for another shape; BatchError for a history id outside the
        vocabulary.
        """
        if logits.shape != (self._vocab_size,):
            raise ContractError(
                f"logits have shape {logits.shape}; sampling wants a row ({self._vocab_size},)"
            )
        best = _checked_argmax(logits)
        options = self._options
        if not (options.is_greedy and options.repetition_penalty == 1):
            row = logits.astype(np.float64)
            if options.repetition_penalty != 1:
                _penalise(row, _checked_ids(history, row.size), options.repetition_penalty)
            if not options.is_greedy:
                return _candidates(row, options)
            best = int(row.argmax())
        return Distribution(ids=np.array([best]), weights=np.ones(1))

    def _draw(self, law: Distribution) -> int:
        return law.draw(0.0 if self._options.is_greedy else self._rng.random())


def _checked_argmax(logits: Logits) -> int:
    """Index of the highest logit, the lowest on ties.

    argmax stops at a NaN, so looking at the value found is enough to refuse a bad row.
    """
    best = int(logits.argmax())
    value = float(logits[best])
    if not math.isfinite(value):
        fault = "are all -inf" if value == -math.inf else f"hold {value} at id {best}"
        raise LogitsError(
            f"the {logits.size} logits {fault}; no token was chosen; "
            "look for overflow in the weights' dtype or for a mask that hides every token"
        )
    return best


def _checked_ids(history: Sequence[int] | Ids, vocab_size: int) -> Ids:
    ids = np.asarray(history, dtype=np.int64)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        raise BatchError(
            f"history holds token id {ids[outside][0]}; ids are 0 to {vocab_size - 1}"
        )
    return ids


def _penalise(row: Floats, ids: Ids, penalty: float) -> None:
    """Divide positive logits of seen tokens by the penalty, multiply negative ones, in place.

    A token seen twice is penalised once. Extreme penalties saturate instead of overflowing.
    """
    seen = row[ids]
    with np.errstate(over="ignore"):
        scaled = np.where(seen > 0, seen / penalty, seen * penalty)
    limit = np.finfo(np.float64).max
    row[ids] = np.where(np.isfinite(seen), np.clip(scaled, -limit, limit), seen)


def _candidates(row: Floats, options: SamplingOptions) -> Distribution:
    """The tokens that survive the filters.

    The best token has weight exactly 1 and survives every filter.
    """
    with np.errstate(over="ignore"):  # a tiny temperature sends the others to -inf
        scaled = (row - row.max()) / options.temperature
    ids = np.flatnonzero(scaled > -np.inf)
    if 0 < options.top_k < ids.size:
        ids = np.sort(ids[_best(scaled[ids], options.top_k)])
    weights = np.exp(scaled[ids])
    if options.min_p > 0:
        keep = weights >= options.min_p
        ids, weights = ids[keep], weights[keep]
    if options.top_p < 1:
        keep = np.sort(_nucleus(weights, options.top_p))
        ids, weights = ids[keep], weights[keep]
    return Distribution(ids=ids, weights=weights)


def _best(scores: Floats, count: int) -> Ids:
    """Indices of the `count` highest scores: higher first, then lower index."""
    if count >= scores.size:
        chosen = np.arange(scores.size)
    else:
        cut = np.partition(scores, scores.size - count)[scores.size - count]
        above = np.flatnonzero(scores > cut)
        ties = np.flatnonzero(scores == cut)[: count - above.size]
        chosen = np.sort(np.concatenate((above, ties)))
    return chosen[np.argsort(-scores[chosen], kind="stable")]


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """The shortest best-first list whose share reaches top_p; the token that reaches it is in.

    Few tokens usually do, so a short list is sorted first, a longer one only where needed.
    """
    target = top_p * weights.sum()
    count = _FIRST_NUCLEUS
    while True:
        order = _best(weights, count)
        mass = np.cumsum(weights[order])
        if mass[-1] >= target or count >= weights.size:
            return order[: int(np.searchsorted(mass, target)) + 1]
        count *= 8


def _with_logprobs(token: int, row: Floats, count: int) -> Choice:
    shifted = row - row.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    best = [int(i) for i in _best(row, count)] if count else []
    top = tuple(TokenLogprob(i, float(logprobs[i])) for i in best if logprobs[i] > -np.inf)
    return Choice(token=token, logprob=float(logprobs[token]), top=top)
