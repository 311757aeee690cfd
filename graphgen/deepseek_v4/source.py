"""A DeepSeek-V4 model as export sees it."""

from __future__ import annotations

from collections.abc import Callable

from cachegraph.graphgen.deepseek_v4.draft import DraftBlock
from cachegraph.graphgen.deepseek_v4.model import DeepseekV4
from cachegraph.graphgen.source import DraftSource, ModelSource
from cachegraph.graphgen.weights.parameter import Read
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.contract import (
    contract,
    ladder,
    planner_specs,
)
from cachegraph.models.deepseek_v4.draft_contract import (
    draft_contract,
    draft_ladder,
    draft_planners,
    hidden_spec,
)
from cachegraph.models.deepseek_v4.serial import to_dict
from cachegraph.models.export_options import ExportOptions
from cachegraph.models.plan_fields import SENTINELS


def model_source(
    config: DeepseekV4Config,
    options: ExportOptions,
    open_read: Callable[[], Read],
    *,
    with_draft: bool,
) -> ModelSource:
    """Everything export needs, from a config and the options; with_draft: the MTP block too."""
    main = DeepseekV4(config, options)
    return ModelSource(
        family="deepseek_v4",
        config=to_dict(config),
        contract=contract(
            config,
            options.capacity,
            options.cache_types,
            options.raw,
            with_streams=with_draft,
        ),
        planners=planner_specs(config, options.capacity),
        ladder=ladder(config, options.capacity),
        sentinels=SENTINELS,
        position_rule="consecutive",
        vocab_size=config.vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        emit=main,
        draft=_draft_source(config, main, options) if with_draft else None,
        open_read=open_read,
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
