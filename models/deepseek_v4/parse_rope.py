"""The RoPE part of config.json: how many dims rotate, and the two sets of frequencies.

Published form: `qk_rope_head_dim`, `rope_theta`, `compress_rope_theta`, and `rope_scaling`, which
applies to compressed layers only. The form of transformers: `partial_rotary_factor` and
`rope_parameters` with one entry for each of `main` and `compress`.
"""

from __future__ import annotations

from collections.abc import Mapping

from cachegraph.models.deepseek_v4.config import Rope
from cachegraph.models.fields import Fields

_BETA_FAST, _BETA_SLOW = 32.0, 1.0  # YaRN's own, where a config leaves them out
# transformers writes these at the top level where a model was made from nested values alone.
_UNSET_THETAS = {"rope_theta": 10000.0, "compress_rope_theta": 160000.0}
_THETAS = {"main": "rope_theta", "compress": "compress_rope_theta"}


def read_ropes(
    top: Fields, head_dim: int | None
) -> tuple[int | None, Rope | None, Rope | None]:
    """Rope dims, main rope and compress rope; None and a noted fault for what is unusable."""
    factors: dict[str, float | None] = {}
    if top.has("partial_rotary_factor"):
        factors["partial_rotary_factor"] = top.number("partial_rotary_factor")
    thetas = {name: top.number(key) for name, key in _THETAS.items() if top.has(key)}
    nested = _nested(top)
    ropes: dict[str, Rope | None] = {}
    for name, key in _THETAS.items():
        part = nested.get(name)
        if part is not None and part.has("partial_rotary_factor"):
            factors[f"rope_parameters.{name}"] = part.number("partial_rotary_factor")
        theta = _theta(top, part, key, thetas.get(name))
        ropes[name] = _rope(part, theta) if part is not None else _plain(theta)
    if not nested:
        ropes["compress"] = _scaled(top, ropes["compress"])
    top.ignore(("rope_scaling", "rope_parameters", "partial_rotary_factor", *_THETAS.values()))
    return _rope_head_dim(top, head_dim, factors), ropes["main"], ropes["compress"]


def _nested(top: Fields) -> dict[str, Fields]:
    """The entries of `rope_parameters`; empty where it is absent or holds one flat set."""
    if not top.has("rope_parameters"):
        return {}
    if top.has("rope_scaling"):
        top.note("rope_scaling and rope_parameters are both given; keep one")
    parameters = top.child("rope_parameters")
    if parameters is None:
        return {}
    parts = {name: part for name in _THETAS if (part := parameters.child(name)) is not None}
    parameters.finish()
    return parts


def _theta(top: Fields, part: Fields | None, key: str, given: float | None) -> float | None:
    """The base of one rope: top level and nested value must agree, and one must be there."""
    if part is None or not part.has("rope_theta"):
        return given if given is not None else top.number(key)
    own = part.number("rope_theta")
    if None not in (own, given) and given not in (own, _UNSET_THETAS[key]):
        top.note(f"{key} is {given}, but rope_parameters says {own}")
    return own


def _plain(theta: float | None) -> Rope | None:
    return None if theta is None else Rope(theta=theta)


def _scaled(top: Fields, rope: Rope | None) -> Rope | None:
    """The compress rope with the flat `rope_scaling` of the published form."""
    if not top.has("rope_scaling"):
        return rope
    scaling = top.child("rope_scaling")
    return _rope(scaling, rope.theta if rope else None, is_flat=True) if scaling else None


def _rope(part: Fields, theta: float | None, *, is_flat: bool = False) -> Rope | None:
    """One set of rope settings, plain or YaRN."""
    part.ignore(("partial_rotary_factor", "rope_theta", "rope_type", "type"))
    kind = part.text("rope_type") if part.has("rope_type") else "default"
    if part.has("type"):
        older = part.text("type")
        if part.has("rope_type") and older != kind:
            part.note(f"rope type is given as {kind!r} and as {older!r}")
        kind = older
    if kind not in (None, "default", "yarn"):
        part.note(f"rope type {kind!r} is not supported; only 'default' and 'yarn' are")
        return _plain(theta)
    rope = _yarn(part, theta, is_flat=is_flat) if kind == "yarn" else _plain(theta)
    part.finish()
    return rope


def _yarn(part: Fields, theta: float | None, *, is_flat: bool) -> Rope | None:
    why = "DeepSeek-V4 never scales cos and sin"
    # transformers derives a factor where a nested entry lacks one; the published form means 1.
    if not is_flat and not part.has("attention_factor"):
        part.note(f"a yarn entry of rope_parameters lacks attention_factor 1.0: {why}")
    part.expect("attention_factor", 1.0, why=why)
    part.expect("truncate", True, why="the ramp runs between whole dims")
    factor = part.number("factor")
    original = part.integer("original_max_position_embeddings")
    fast = part.number("beta_fast") if part.has("beta_fast") else _BETA_FAST
    slow = part.number("beta_slow") if part.has("beta_slow") else _BETA_SLOW
    part.ignore(("beta_fast", "beta_slow"))
    if theta is None or factor is None or original is None or fast is None or slow is None:
        return None
    return Rope(
        theta=theta, factor=factor, original_context=original, beta_fast=fast, beta_slow=slow
    )


def _rope_head_dim(
    top: Fields, head_dim: int | None, factors: Mapping[str, float | None]
) -> int | None:
    """`qk_rope_head_dim`, or int(head_dim * factor) as transformers computes it."""
    is_asked = top.has("qk_rope_head_dim") or not factors
    given = top.integer("qk_rope_head_dim") if is_asked else None
    if head_dim is None:
        return given
    for where, factor in factors.items():
        if factor is None:
            continue
        dims = int(head_dim * factor)
        if given is not None and dims != given:
            top.note(f"{where} {factor} of head_dim {head_dim} gives {dims} dims, not {given}")
        given = dims if given is None else given
    return given
