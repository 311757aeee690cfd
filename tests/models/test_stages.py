"""Splits into stages: what is refused, and which rows a stage has."""

from __future__ import annotations

import pytest
from support.tiny import tiny_config

from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CARRIED, LOGITS, OUT_ROWS, STREAMS, Contract
from cachegraph.models.deepseek_v4.contract import contract, stream_width
from cachegraph.models.errors import ConfigError
from cachegraph.models.export_options import ExportOptions
from cachegraph.models.stages import stage_contract, stage_layers

pytestmark = pytest.mark.r0


def names(part: Contract, *, outputs: bool = False) -> set[str]:
    rows = part.outputs if outputs else part.inputs
    return {row.name for row in rows}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"split": (2, 0)}, "every stage needs 1 layer or more"),
        ({"split": (2, 2), "devices": ("cpu",)}, "names 1 for 2 stages"),
        ({"devices": ("cpu",)}, "needs --split"),
        ({"split": (2, 2), "devices": ("cpu", "gpu")}, "no device 'gpu'"),
        ({"split": (2, 2), "devices": ("cpu", "cuda:x")}, "no device 'cuda:x'"),
    ],
)
def test_what_cannot_be_a_split_is_refused(choices: dict[str, tuple], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExportOptions(**choices)


def test_a_split_holds_every_layer() -> None:
    assert stage_layers((2, 3, 1), 6) == (range(2), range(2, 5), range(5, 6))
    with pytest.raises(ConfigError, match="makes 5 layers; the model has 6"):
        stage_layers((2, 3), 6)


def test_stages_have_what_their_layers_need_and_all_caches_together() -> None:
    config = tiny_config()
    whole = contract(config, Capacity(context=64))
    width = stream_width(config)
    stages = [
        stage_contract(whole, layers, width)
        for layers in stage_layers((1, config.num_layers - 2, 1), config.num_layers)
    ]
    assert [c for stage in stages for c in stage.caches] == list(whole.caches)
    assert [CARRIED in names(stage) for stage in stages] == [False, True, True]
    assert [OUT_ROWS in names(stage) for stage in stages] == [False, False, True]
    assert [LOGITS in names(s, outputs=True) for s in stages] == [False, False, True]
    assert [STREAMS in names(s, outputs=True) for s in stages] == [True, True, False]
    for stage in stages:
        kinds = {spec.kind.value for spec in stage.caches}
        plans = {name.split(".")[1] for name in names(stage) if name.startswith("plan.")}
        assert plans == kinds & {"raw", "csa", "hca"}
