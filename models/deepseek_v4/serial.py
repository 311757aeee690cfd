"""The JSON form of a DeepSeek-V4 config, as a manifest holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields

from pydantic import TypeAdapter, ValidationError

from cachegraph.models.deepseek_v4.config import DeepseekV4Config, Rope
from cachegraph.models.errors import ConfigError

_ADAPTER = TypeAdapter(DeepseekV4Config)
_ROPES = ("rope_main", "rope_compress")


def to_dict(config: DeepseekV4Config) -> dict[str, object]:
    """Plain JSON types, every field present."""
    dumped: dict[str, object] = _ADAPTER.dump_python(config, mode="json")
    return dumped


def from_dict(raw: Mapping[str, object]) -> DeepseekV4Config:
    """The inverse of `to_dict`; ConfigError for a missing, unknown, mistyped or wrong field."""
    faults = _key_faults("", raw, {field.name for field in fields(DeepseekV4Config)})
    for name in _ROPES:
        rope = raw.get(name)
        if isinstance(rope, Mapping):
            faults += _key_faults(f"{name}.", rope, {field.name for field in fields(Rope)})
    if faults:
        raise ConfigError("stored DeepSeek-V4 config: " + "; ".join(faults))
    try:
        return _ADAPTER.validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, fault['loc'])) or 'value'}: {fault['msg']}"
            for fault in error.errors(include_url=False)
        ]
        raise ConfigError("stored DeepSeek-V4 config: " + "; ".join(lines)) from error


def _key_faults(where: str, raw: Mapping[str, object], wanted: set[str]) -> list[str]:
    missing = [f"{where}{name} is missing" for name in sorted(wanted - set(raw))]
    return missing + [f"{where}{name} is unknown" for name in sorted(set(raw) - wanted)]
