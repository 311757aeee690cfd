"""Masks of attention."""

from __future__ import annotations

MASKED = -1e30  # finite: a row masked for every key stays finite, and exp gives an exact 0
