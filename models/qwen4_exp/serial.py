"""The JSON form of a Qwen4-Exp config, as a manifest holds it."""

from __future__ import annotations

from collections.abc import Mapping

from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig
from cachegraph.models.stored_config import dump_config, load_stored_config


def to_dict(config: Qwen4ExpConfig) -> dict[str, object]:
    """Plain JSON types, every field present."""
    return dump_config(Qwen4ExpConfig, config)


def from_dict(raw: Mapping[str, object]) -> Qwen4ExpConfig:
    """The inverse of `to_dict`; ConfigError for a missing, unknown, mistyped or wrong field."""
    return load_stored_config(Qwen4ExpConfig, raw, "Qwen4-Exp", {})
