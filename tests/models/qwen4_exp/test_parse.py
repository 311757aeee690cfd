"""config.json of text and multimodal checkpoints, and every way in which it can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import qwen4_exp as tiny

from cachegraph.models.errors import ConfigError
from cachegraph.models.qwen4_exp.config import GateActivation, LayerKind
from cachegraph.models.qwen4_exp.parse import load_config, parse_config
from cachegraph.models.qwen4_exp.presets import PRESETS
from cachegraph.tools.random_qwen4_exp import config_json

pytestmark = pytest.mark.r0

FLASH = PRESETS["qwen3.8-flash-next"]
TEXT = {**FLASH["text_config"], "architectures": ["Qwen4ExpForCausalLM"]}
ABSENT = object()
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def changed(base, changes):
    raw = json.loads(json.dumps(base))
    for path, value in changes.items():
        *above, key = path.split("/")
        place = raw
        for name in above:
            place = place[name]
        if value is ABSENT:
            del place[key]
        else:
            place[key] = value
    return raw


def faults(raw):
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    return str(caught.value).split("\n  - ")[1:]


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_what_the_tiny_configs_write_is_read_back(name):
    config = tiny.tiny_config(name)
    assert parse_config(config_json(config)) == config


def test_the_release_is_read_as_published():
    config = parse_config(FLASH)
    assert parse_config(TEXT) == config
    assert [config.layer_kinds.count(kind) for kind in LayerKind] == [36, 12]
    assert config.layer_kinds[:4] == (*[LayerKind.GDN] * 3, LayerKind.QSA)
    assert (config.rotary_dim, config.mrope_section) == (64, (11, 11, 10))
    assert config.ple_layers == (1,)  # the file counts from 1
    assert (config.ngram_shards, config.ngram_seed) == (128, 1234)
    assert (config.ngram_end, config.eos_token_ids) == (248044, (248044,))
    assert config.output_gate is GateActivation.SIGMOID
    assert config.norm_topk_prob


def test_sizes_that_follow_for_the_release():
    config = parse_config(FLASH)
    assert (config.conv_channels, config.conv_history) == (10240, 3)
    assert (config.stream_width, config.ngram_history) == (10240, 9)
    assert config.state_width * 4 == 3 * 2**20
    assert (config.top_pools, config.ngram_head_dim) == (512, 160)


@pytest.mark.parametrize(
    ("changes", "field", "wanted"),
    [
        ({"layer_types": ABSENT}, "num_layers", 48),
        ({"full_attention_interval": ABSENT}, "num_layers", 48),
        (
            {"num_hidden_layers": 3, "full_attention_interval": ABSENT}
            | {"layer_types": ["indexed_attention", "linear_attention", "full_attention"]},
            "layer_kinds",
            (LayerKind.QSA, LayerKind.GDN, LayerKind.QSA),
        ),
        (
            {"num_hidden_layers": 4, "full_attention_interval": 4}
            | {"layer_types": [*["linear_attention"] * 3, "qwen_sparse_attention"]},
            "layer_kinds",
            (*[LayerKind.GDN] * 3, LayerKind.QSA),
        ),
        # several ends: n-grams are cut at the first
        ({"eos_token_id": [248046, 248044]}, "ngram_end", 248046),
        ({"eos_token_id": [248046, 248044]}, "eos_token_ids", (248046, 248044)),
        ({"ple_layer_ids": [6, 2, 6]}, "ple_layers", (1, 5)),
        ({"ple_layer_ids": None}, "ple_layers", ()),
        ({"ple_layer_ids": [], "eos_token_id": None}, "eos_token_ids", ()),
        ({"ple_layer_ids": [], "split_ngram_parts": ABSENT}, "ple_layers", ()),
        ({"ple_embed_dim": None}, "ple_embed_dim", 2560),
        ({"seed": 7}, "ngram_seed", 7),
        ({"norm_topk_prob": False}, "norm_topk_prob", False),
        ({"output_gate_type": "silu"}, "output_gate", GateActivation.SILU),
        ({"output_gate_type": None}, "output_gate", GateActivation.SILU),
        ({"partial_rotary_factor": ABSENT}, "rotary_dim", 64),
        ({"rope_theta": 1e7}, "rope_theta", 1e7),
        ({"quantization_config": FP8}, "num_layers", 48),
    ],
)
def test_variants_that_are_fine(changes, field, wanted):
    assert getattr(parse_config(changed(TEXT, changes)), field) == wanted
    outer = changed(FLASH, {f"text_config/{path}": value for path, value in changes.items()})
    assert getattr(parse_config(outer), field) == wanted


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"zebra": 1}, "zebra is not a key"),
        ({"hidden_size": ABSENT}, "hidden_size is missing"),
        ({"hidden_size": "2560"}, "hidden_size is '2560'"),
        ({"hc_count": 0}, "hc_count is 0"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0.0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"architectures": ["Other"]}, "architectures is ['Other']"),
        ({"num_key_value_heads": 5}, "24 is not a multiple of num_key_value_heads 5"),
        ({"linear_num_key_heads": 7}, "48 is not a multiple of linear_num_key_heads 7"),
        ({"num_experts_per_tok": 513}, "greater than num_experts 512"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2"),
        ({"indexer_kv_heads": ABSENT}, "indexer_kv_heads is missing"),
        ({"indexer_n_heads": None}, "indexer_n_heads is missing"),
        ({"indexer_head_dim": 62}, "64 rotated channels are more than indexer_head_dim 62"),
        ({"indexer_budget": 2046}, "2046 is not a multiple of indexer_compress_ratio 4"),
        ({"layer_types": ["linear_attention"] * 47}, "layer_types has 47 entries"),
        ({"layer_types": ["sliding_attention"] * 48}, "holds ['sliding_attention']"),
        ({"layer_types": ["linear_attention"] * 48}, "full_attention_interval disagree"),
        ({"layer_types": ABSENT, "full_attention_interval": 0}, "interval is 0"),
        (
            {"layer_types": ABSENT, "full_attention_interval": ABSENT},
            "layer_types is missing",
        ),
        ({"ple_layer_ids": [4]}, "ple layers (3,) (counted from 0) are not all gated"),
        ({"ple_layer_ids": [0]}, "ple layers (-1,)"),
        ({"ple_layer_ids": [49]}, "ple layers (48,) (counted from 0) reach beyond"),
        ({"ple_embed_dim": 2561}, "ple_embed_dim 2561 is not a multiple"),
        ({"split_ngram_parts": ABSENT}, "split_ngram_parts is missing"),
        ({"eos_token_id": None}, "eos_token_id is missing; n-grams are cut at it"),
        ({"eos_token_id": 248320}, "eos_token_id 248320, at which n-grams are cut"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is [1, '2']"),
        ({"rope_parameters": ABSENT}, "rope_parameters is missing"),
        ({"rope_parameters/rope_type": "yarn"}, "rope_parameters.rope_type is 'yarn'"),
        ({"rope_parameters/factor": 4.0}, "rope_parameters.factor is not a key"),
        ({"rope_parameters/mrope_interleaved": False}, "mrope_interleaved is False"),
        ({"rope_parameters/mrope_section": ABSENT}, "mrope_section is missing"),
        ({"rope_parameters/mrope_section": [11, 11]}, "mrope_section (11, 11)"),
        ({"rope_parameters/mrope_section": [12, 11, 10]}, "does not add up to half of the 64"),
        ({"rope_parameters/rope_theta": 1}, "rope_theta is 1.0"),
        ({"partial_rotary_factor": 0.5}, "is 0.5, but rope_parameters says 0.25"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'"),
        ({"quantization_config": {"weight_block_size": [1, 1]}}, "weight_block_size"),
        ({"quantization_config": {"new": 1}}, "quantization_config.new is not a key"),
    ],
)
def test_each_fault_is_named(changes, fact):
    found = faults(changed(TEXT, changes))
    assert any(fact in fault for fault in found), found


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"text_config": ABSENT}, "text_config is missing"),
        ({"text_config": []}, "text_config is []"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"architectures": ["Other"]}, "architectures is ['Other']"),
        ({"zebra": 1}, "zebra is not a key"),
        ({"text_config/zebra": 1}, "text_config.zebra is not a key"),
        ({"text_config/model_type": "qwen3_5_text"}, "text_config.model_type"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quant_method is 'modelopt'"),
    ],
)
def test_each_fault_around_the_text_config_is_named(changes, fact):
    found = faults(changed(FLASH, changes))
    assert any(fact in fault for fault in found), found


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "deepseek_v4", ABSENT])
def test_other_architectures_are_refused_by_name_alone(model_type):
    found = faults(changed(TEXT, {"model_type": model_type}))
    assert len(found) == 1
    assert "model_type is" in found[0]


def test_one_change_gives_one_fault():
    """A fault must not drag others along, so that the list can be worked off."""
    for changes in (
        {"hidden_size": "x"},
        {"num_hidden_layers": None},
        {"rope_parameters/rope_type": "linear"},
        {"indexer_kv_heads": 2},
        {"output_gate_type": "tanh"},
        {"ple_layer_ids": [4]},
    ):
        assert len(faults(changed(TEXT, changes))) == 1, changes


def test_all_faults_come_at_once():
    changes = {
        "hc_lowrank": ABSENT,
        "zebra": 1,
        "hidden_act": "gelu",
        "indexer_head_dim": 1.5,
        "rope_parameters/mrope_interleaved": False,
        "eos_token_id": None,
    }
    assert len(faults(changed(TEXT, changes))) == len(changes)


def test_a_folder_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path)
