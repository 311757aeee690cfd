"""The checkpoints that come with the package, by name. Knows nothing of what is in them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from cachegraph.models.errors import ConfigError

PREFIX = "tiny:"
_FOLDER = "checkpoints"
NAMES = {"deepseek_v4": "deepseek_v4_tiny", "qwen4_exp": "qwen4_exp_tiny"}


def known_names() -> tuple[str, ...]:
    """Every name that `resolve` takes."""
    return tuple(f"{PREFIX}{name}" for name in NAMES)


def resolve(checkpoint: str | Path) -> Path:
    """The folder of a shipped checkpoint (`tiny:deepseek_v4`), or the path that was given.

    ConfigError for an unknown name, and for a path that is no folder.
    """
    text = str(checkpoint)
    if not text.startswith(PREFIX):
        return _folder(Path(checkpoint))
    name = text.removeprefix(PREFIX)
    if name not in NAMES:
        raise ConfigError(
            f"no shipped checkpoint {text!r}; there are {', '.join(known_names())}"
        )
    return _folder(Path(str(files("cachegraph.models"))) / _FOLDER / NAMES[name])


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(
            f"{path} is not a folder; give a checkpoint folder or one of "
            f"{', '.join(known_names())}"
        )
    return path
