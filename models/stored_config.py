"""The JSON form of a family's config dataclass, as a manifest holds it.

Every field is written, and on reading every field must be there: a manifest has no defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from cachegraph.models.errors import ConfigError

Config = TypeVar("Config")


def dump_config(kind: type[Config], config: Config) -> dict[str, object]:
    """Plain JSON types, every field present."""
    dumped: dict[str, object] = TypeAdapter(kind).dump_python(config, mode="json")
    return dumped


def load_stored_config(
    kind: type[Config], raw: Mapping[str, object], label: str, parts: Mapping[str, type]
) -> Config:
    """The inverse of `dump_config`; ConfigError for a missing, unknown, mistyped or wrong field.

    label: the family in messages. parts: fields that are dataclasses themselves.
    """
    faults = _key_faults("", raw, kind)
    for name, part in parts.items():
        value = raw.get(name)
        if isinstance(value, Mapping):
            faults += _key_faults(f"{name}.", value, part)
    if faults:
        raise ConfigError(f"stored {label} config: " + "; ".join(faults))
    try:
        return TypeAdapter(kind).validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, fault['loc'])) or 'value'}: {fault['msg']}"
            for fault in error.errors(include_url=False)
        ]
        raise ConfigError(f"stored {label} config: " + "; ".join(lines)) from error


def _key_faults(where: str, raw: Mapping[str, object], kind: Any) -> list[str]:
    wanted = {field.name for field in fields(kind)}
    missing = [f"{where}{name} is missing" for name in sorted(wanted - set(raw))]
    return missing + [f"{where}{name} is unknown" for name in sorted(set(raw) - wanted)]
