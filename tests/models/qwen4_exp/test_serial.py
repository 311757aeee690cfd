"""The JSON form of a config, and configs made by hand."""

from __future__ import annotations

import json

import pytest
from support import qwen4_exp as tiny

from cachegraph.models.errors import ConfigError
from cachegraph.models.qwen4_exp.presets import PRESETS, preset_config
from cachegraph.models.qwen4_exp.serial import from_dict, to_dict

pytestmark = pytest.mark.r0

CONFIGS = [tiny.tiny_config(name) for name in tiny.CONFIGS] + [
    preset_config(name) for name in PRESETS
]


@pytest.mark.parametrize("config", CONFIGS)
def test_round_trip_through_json_text(config):
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_config_without_special_tokens_and_ngrams_survives():
    config = tiny.tiny_config(bos_token_id=None, eos_token_ids=(), ple_layers=())
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("key", "value", "fact"),
    [
        ("extra", 1, "extra is unknown"),
        ("head_dim", "16", "head_dim: "),
        ("head_dim", 16.5, "head_dim: "),
        ("layer_kinds", ["gdn", "other"], "layer_kinds"),
        ("output_gate", "tanh", "output_gate"),
        ("mrope_section", [2, 2], "mrope_section"),
        ("num_kv_heads", 3, "not a multiple of num_key_value_heads 3"),
    ],
)
def test_a_stored_config_is_checked(key, value, fact):
    raw = to_dict(tiny.tiny_config())
    raw[key] = value
    with pytest.raises(ConfigError, match=fact):
        from_dict(raw)


def test_a_missing_field_is_named():
    raw = to_dict(tiny.tiny_config())
    del raw["hc_count"]
    with pytest.raises(ConfigError, match="stored Qwen4-Exp config: hc_count is missing"):
        from_dict(raw)


def test_a_config_is_checked_when_made():
    with pytest.raises(ConfigError, match="are odd") as caught:
        tiny.tiny_config(rotary_dim=7, ple_layers=(3,), hidden_size=0)
    assert str(caught.value).count("\n  - ") == 4  # 7 is not twice its sections either


def test_presets_are_named_in_the_error():
    with pytest.raises(ConfigError, match=r"qwen3\.8-flash-next"):
        preset_config("qwen4")
