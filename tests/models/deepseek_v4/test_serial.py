"""The JSON form of a config, and configs made by hand."""

from __future__ import annotations

import json

import pytest
from support import tiny

from cachegraph.models.deepseek_v4.presets import PRESETS, preset_config
from cachegraph.models.deepseek_v4.serial import from_dict, to_dict
from cachegraph.models.errors import ConfigError

pytestmark = pytest.mark.r0

CONFIGS = [tiny.tiny_config(name) for name in tiny.CONFIGS] + [
    preset_config(name) for name in PRESETS
]


@pytest.mark.parametrize("config", CONFIGS)
def test_round_trip_through_json_text(config):
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_config_without_special_tokens_survives():
    config = tiny.tiny_config(bos_token_id=None, eos_token_ids=())
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("key", "value", "fact"),
    [
        ("extra", 1, "extra is unknown"),
        ("head_dim", "20", "head_dim: "),
        ("head_dim", 20.5, "head_dim: "),
        ("layer_kinds", ["window", "other"], "layer_kinds"),
        ("rope_main", {"theta": 1e4}, "rope_main.factor is missing"),
        ("o_groups", 4, "not a multiple of o_groups 4"),
    ],
)
def test_a_stored_config_is_checked(key, value, fact):
    raw = to_dict(tiny.tiny_config())
    raw[key] = value
    with pytest.raises(ConfigError, match=fact):
        from_dict(raw)


def test_a_missing_field_is_named():
    raw = to_dict(tiny.tiny_config())
    del raw["hc_mult"]
    with pytest.raises(ConfigError, match="hc_mult is missing"):
        from_dict(raw)


def test_a_config_is_checked_when_made():
    with pytest.raises(ConfigError, match="is odd") as caught:
        tiny.tiny_config(rope_head_dim=5, num_hash_layers=9, hidden_size=0)
    assert str(caught.value).count("\n  - ") == 3


def test_presets_are_named_in_the_error():
    with pytest.raises(ConfigError, match=r"deepseek-v4-flash, deepseek-v4-pro"):
        preset_config("deepseek-v4")


def test_pro_has_its_own_sizes():
    pro = preset_config("deepseek-v4-pro")
    assert (pro.num_layers, pro.hidden_size, pro.num_heads) == (61, 7168, 128)
    assert (pro.o_groups, pro.num_experts, pro.expert_size) == (16, 384, 3072)
