"""Reading config.json of a checkpoint folder; what is in it is each family's own matter."""

from __future__ import annotations

import json
from pathlib import Path

from cachegraph.models.errors import ConfigError


def read_config_file(folder: Path) -> dict[str, object]:
    """The object in config.json. ConfigError where the file is missing or holds none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; a checkpoint folder holds config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); download the file again") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}; it must be a JSON object")
    return raw
