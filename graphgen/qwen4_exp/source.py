"""A Qwen4-Exp model as export sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from cachegraph.graphgen.qwen4_exp.model import Qwen4Exp
from cachegraph.graphgen.qwen4_exp.ngram import table_form, table_weight
from cachegraph.graphgen.source import ModelSource
from cachegraph.graphgen.weights.parameter import Read, Weight
from cachegraph.graphgen.weights.reader import open_checkpoint
from cachegraph.models.errors import ConfigError
from cachegraph.models.export_options import ExportOptions, NgramPlace
from cachegraph.models.qwen4_exp.config import Qwen4ExpConfig
from cachegraph.models.qwen4_exp.contract import contract, ladder, planner_specs
from cachegraph.models.qwen4_exp.parse import load_config
from cachegraph.models.qwen4_exp.presets import preset_config
from cachegraph.models.qwen4_exp.serial import to_dict
from cachegraph.models.qwen4_exp.tensors import checkpoint_table
from cachegraph.models.recurrent_spec import START

_LOG = logging.getLogger(__name__)
_LARGEST_TABLE = 10**9  # bytes of an n-gram table that a graph holds unless it is told to


def checkpoint_source(folder: Path, options: ExportOptions) -> ModelSource:
    """The model in a checkpoint folder."""
    config = load_config(folder)
    return model_source(
        config, options, lambda: open_checkpoint(folder, checkpoint_table(config)).read
    )


def preset_source(name: str, options: ExportOptions) -> ModelSource:
    """A published model by name, without weights."""

    def open_read() -> Read:
        raise AssertionError("a preset has no weights to read")

    return model_source(preset_config(name), options, open_read)


def model_source(
    config: Qwen4ExpConfig, options: ExportOptions, open_read: Callable[[], Read]
) -> ModelSource:
    """Everything export needs, from a config and the options.

    ConfigError for options that this family has no graph for.
    """
    _check(options)
    tables = _host_tables(config, options)
    return ModelSource(
        family="qwen4_exp",
        config=to_dict(config),
        contract=contract(
            config,
            options.capacity,
            options.cache_types,
            options.raw,
            host_ngrams=bool(tables),
        ),
        planners=planner_specs(config, options.capacity),
        ladder=ladder(config, options.capacity),
        sentinels={START: "all 0: the state of a sequence without tokens"},
        position_rule="ordered",
        vocab_size=config.vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        emit=Qwen4Exp(config, options, host_tables=bool(tables)),
        draft=None,
        stages=(),
        open_read=open_read,
        tables=tables,
    )


def _host_tables(config: Qwen4ExpConfig, options: ExportOptions) -> tuple[Weight, ...]:
    """The tables that the graph leaves to the host, if any."""
    form = table_form(options)
    tables = [table_weight(config, module, form) for module in range(len(config.ple_layers))]
    large = any(table.num_bytes > _LARGEST_TABLE for table in tables)
    if options.ngram is NgramPlace.GRAPH or (options.ngram is NgramPlace.AUTO and not large):
        return ()
    for module, table in enumerate(tables):
        table.name = f"ngram.{module}"
    return tuple(tables)


def _check(options: ExportOptions) -> None:
    if options.split:
        raise ConfigError("a Qwen4-Exp model is one graph; leave out --split")
    if options.capacity.pinned:
        raise ConfigError("Qwen4-Exp has no raw window to pin rows in; leave out --pinned")
