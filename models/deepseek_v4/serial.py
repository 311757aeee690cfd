"""The JSON form of a DeepSeek-V4 config, as a manifest holds it."""

from __future__ import annotations

from collections.abc import Mapping

from cachegraph.models.deepseek_v4.config import DeepseekV4Config, Rope
from cachegraph.models.stored_config import dump_config, load_stored_config


def to_dict(config: DeepseekV4Config) -> dict[str, object]:
    """Plain JSON types, every field present."""
    return dump_config(DeepseekV4Config, config)


def from_dict(raw: Mapping[str, object]) -> DeepseekV4Config:
    """The inverse of `to_dict`; ConfigError for a missing, unknown, mistyped or wrong field."""
    parts = {"rope_main": Rope, "rope_compress": Rope}
    return load_stored_config(DeepseekV4Config, raw, "DeepSeek-V4", parts)
