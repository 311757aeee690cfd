"""A DeepSeek-V4 model as export sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cachegraph.graphgen.deepseek_v4.draft import DraftBlock
from cachegraph.graphgen.deepseek_v4.model import DeepseekV4
from cachegraph.graphgen.source import DraftSource, ModelSource, StageSource
from cachegraph.graphgen.weights.files import read_folder
from cachegraph.graphgen.weights.parameter import Read
from cachegraph.graphgen.weights.reader import open_checkpoint
from cachegraph.models.contract import Contract
from cachegraph.models.deepseek_v4.checkpoint import checkpoint_table
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.contract import (
    contract,
    ladder,
    planner_specs,
    stream_width,
)
from cachegraph.models.deepseek_v4.draft_contract import (
    draft_contract,
    draft_ladder,
    draft_planners,
    hidden_spec,
)
from cachegraph.models.deepseek_v4.draft_tensors import has_draft
from cachegraph.models.deepseek_v4.parse import load_config
from cachegraph.models.deepseek_v4.presets import preset_config
from cachegraph.models.deepseek_v4.serial import to_dict
from cachegraph.models.errors import ConfigError
from cachegraph.models.export_options import ExportOptions, NgramPlace
from cachegraph.models.plan_fields import SENTINELS
from cachegraph.models.stages import stage_contract, stage_layers


def checkpoint_source(folder: Path, options: ExportOptions) -> ModelSource:
    """The model in a checkpoint folder, with its MTP block where it has one and it is wanted."""
    config = load_config(folder)
    with_draft = options.draft and has_draft(read_folder(folder))

    def open_read() -> Read:
        return open_checkpoint(folder, checkpoint_table(config, with_draft=with_draft)).read

    return model_source(config, options, open_read, with_draft=with_draft)


def preset_source(name: str, options: ExportOptions) -> ModelSource:
    """A published model by name, without weights."""

    def open_read() -> Read:
        raise AssertionError("a preset has no weights to read")

    config = preset_config(name)
    with_draft = options.draft and config.num_nextn_layers > 0
    return model_source(config, options, open_read, with_draft=with_draft)


def model_source(
    config: DeepseekV4Config,
    options: ExportOptions,
    open_read: Callable[[], Read],
    *,
    with_draft: bool,
) -> ModelSource:
    """Everything export needs, from a config and the options; with_draft: the MTP block too.

    ConfigError for options that this family has no graph for.
    """
    if options.ngram is not NgramPlace.AUTO:
        raise ConfigError("a DeepSeek-V4 model has no n-gram tables; leave out --ngram")
    main = DeepseekV4(config, options)
    whole = contract(
        config,
        options.capacity,
        options.cache_types,
        options.raw,
        with_streams=with_draft,
    )
    return ModelSource(
        family="deepseek_v4",
        config=to_dict(config),
        contract=whole,
        planners=planner_specs(config, options.capacity),
        ladder=ladder(config, options.capacity),
        sentinels=SENTINELS,
        position_rule="consecutive",
        vocab_size=config.vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        emit=main,
        draft=_draft_source(config, main, options) if with_draft else None,
        stages=_stages(config, whole, options),
        open_read=open_read,
    )


def _stages(
    config: DeepseekV4Config, whole: Contract, options: ExportOptions
) -> tuple[StageSource, ...]:
    if not options.split:
        return ()
    parts = stage_layers(options.split, config.num_layers)
    devices = options.devices or (None,) * len(parts)
    return tuple(
        StageSource(
            layers=layers,
            contract=stage_contract(whole, layers, stream_width(config)),
            device=device,
        )
        for layers, device in zip(parts, devices, strict=True)
    )


def _draft_source(
    config: DeepseekV4Config, main: DeepseekV4, options: ExportOptions
) -> DraftSource:
    return DraftSource(
        contract=draft_contract(config, options.capacity, options.cache_types),
        planners=draft_planners(config, options.capacity),
        ladder=draft_ladder(config, options.capacity),
        hidden=hidden_spec(config, options.capacity),
        emit=DraftBlock(config, main, options),
    )
