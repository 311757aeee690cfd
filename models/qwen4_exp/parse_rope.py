"""The rotary part of config.json: how many channels rotate, and at which of three positions.

`rope_parameters` holds theta, the rotated part of a head and the sections; the published file says
the part a second time beside it, and where both are given they must agree.
"""

from __future__ import annotations

from typing import Any

from cachegraph.models.fields import Fields

_TWICE = ("rope_theta", "partial_rotary_factor")


def read_rope(text: Fields, head_dim: int | None) -> dict[str, Any]:
    """rotary_dim, rope_theta and mrope_section; None and a noted fault for what is unusable."""
    nothing = {"rotary_dim": None, "rope_theta": None, "mrope_section": None}
    part = text.child("rope_parameters")
    text.ignore(_TWICE)
    if part is None:
        return nothing
    part.expect("rope_type", "default", why="positions are not scaled")
    part.expect("type", "default", why="positions are not scaled")
    part.expect("mrope_interleaved", True, why="frequencies of t, y and x take turns")
    theta, factor = (_agreed(text, part, key) for key in _TWICE)
    section = part.integers("mrope_section")
    part.finish()
    # int() as transformers has it
    rotary = None if factor is None or head_dim is None else int(head_dim * factor)
    return {"rotary_dim": rotary, "rope_theta": theta, "mrope_section": section}


def _agreed(text: Fields, part: Fields, key: str) -> float | None:
    """A number of `rope_parameters`, which may stand beside it too."""
    own = part.number(key)
    beside = text.number(key) if text.has(key) else own
    if None not in (own, beside) and own != beside:
        text.note(f"{key} is {beside}, but rope_parameters says {own}")
    return own
