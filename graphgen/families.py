"""The families that can be exported, and which one a checkpoint or a preset belongs to."""

from __future__ import annotations

from pathlib import Path

from cachegraph.graphgen.deepseek_v4 import source as deepseek_v4
from cachegraph.graphgen.qwen4_exp import source as qwen4_exp
from cachegraph.graphgen.source import ModelSource
from cachegraph.models.config_file import read_config_file
from cachegraph.models.deepseek_v4.presets import PRESETS as DEEPSEEK_V4_PRESETS
from cachegraph.models.errors import ConfigError
from cachegraph.models.export_options import ExportOptions
from cachegraph.models.qwen4_exp.parse import MULTIMODAL, TEXT
from cachegraph.models.qwen4_exp.presets import PRESETS as QWEN4_EXP_PRESETS


def checkpoint_source(folder: Path, options: ExportOptions) -> ModelSource:
    """The model in a checkpoint folder, by its config's `model_type`.

    ConfigError where config.json is missing or unusable, or names a family that is not built.
    """
    kind = read_config_file(folder).get("model_type")
    family = (
        qwen4_exp if kind in (MULTIMODAL, TEXT) else deepseek_v4
    )  # which says why it refuses
    return family.checkpoint_source(folder, options)


def preset_source(name: str, options: ExportOptions) -> ModelSource:
    """A published model by name, without weights; ConfigError names those that there are."""
    if name in QWEN4_EXP_PRESETS:
        return qwen4_exp.preset_source(name, options)
    if name in DEEPSEEK_V4_PRESETS:
        return deepseek_v4.preset_source(name, options)
    known = ", ".join(sorted((*DEEPSEEK_V4_PRESETS, *QWEN4_EXP_PRESETS)))
    raise ConfigError(f"no preset {name!r}; there are {known}")
