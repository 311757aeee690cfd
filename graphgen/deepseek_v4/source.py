"""A DeepSeek-V4 model as export sees it."""

from __future__ import annotations

from collections.abc import Callable

from cachegraph.graphgen.deepseek_v4.model import DeepseekV4
from cachegraph.graphgen.source import ModelSource
from cachegraph.graphgen.weights.parameter import Read
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.contract import (
    contract,
    ladder,
    planner_specs,
)
from cachegraph.models.deepseek_v4.serial import to_dict
from cachegraph.models.export_options import ExportOptions
from cachegraph.models.plan_fields import SENTINELS


def model_source(
    config: DeepseekV4Config, options: ExportOptions, open_read: Callable[[], Read]
) -> ModelSource:
    """Everything export needs, from a config and the options."""
    return ModelSource(
        family="deepseek_v4",
        config=to_dict(config),
        contract=contract(config, options.capacity, options.cache_types, options.raw),
        planners=planner_specs(config, options.capacity),
        ladder=ladder(config, options.capacity),
        sentinels=SENTINELS,
        position_rule="consecutive",
        vocab_size=config.vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        emit=DeepseekV4(config, options),
        open_read=open_read,
    )
