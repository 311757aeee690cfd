"""config.json in both spellings, and every way in which it can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import tiny

from cachegraph.models.deepseek_v4.config import LayerKind, Rope
from cachegraph.models.deepseek_v4.parse import load_config, parse_config
from cachegraph.models.deepseek_v4.presets import PRESETS
from cachegraph.models.errors import ConfigError
from cachegraph.tools.random_checkpoint import config_json

pytestmark = pytest.mark.r0

FLASH = PRESETS["deepseek-v4-flash"]
WRITTEN = config_json(tiny.tiny_config("ratios"))  # as transformers writes it
ABSENT = object()


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


def test_flash_is_read_as_published():
    config = parse_config(FLASH)
    assert config.num_layers == 43
    assert [config.layer_kinds.count(kind) for kind in LayerKind] == [2, 21, 20]
    assert config.rope_main == Rope(theta=10000.0)
    assert config.rope_compress == Rope(theta=160000.0, factor=16.0, original_context=65536)
    assert (config.eos_token_ids, config.bos_token_id, config.num_nextn_layers) == ((1,), 0, 1)
    assert [config.is_hash(layer) for layer in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("changes", "field", "wanted"),
    [
        ({"compress_ratios": [0, 0, *[4, 128] * 20, 4]}, "num_layers", 43),  # no MTP entry
        ({"eos_token_id": [1, 5]}, "eos_token_ids", (1, 5)),
        ({"eos_token_id": None, "bos_token_id": ABSENT}, "eos_token_ids", ()),
        ({"rope_scaling": ABSENT}, "rope_compress", Rope(theta=160000.0)),
        ({"rope_scaling": None}, "rope_compress", Rope(theta=160000.0)),
        ({"rope_scaling/rope_type": "yarn"}, "rope_head_dim", 64),
        ({"rope_scaling/attention_factor": 1.0}, "rope_head_dim", 64),
        ({"quantization_config": ABSENT, "expert_dtype": ABSENT}, "num_layers", 43),
        ({"torch_dtype": "bfloat16", "use_cache": True}, "num_layers", 43),
        ({"mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40}, "num_hash_layers", 3),
        # int(512 * 0.13) as transformers computes it
        ({"qk_rope_head_dim": ABSENT, "partial_rotary_factor": 0.13}, "rope_head_dim", 66),
        ({"compress_rates": {"heavily_compressed_attention": 128}}, "hca_ratio", 128),
    ],
)
def test_variants_that_are_fine(changes, field, wanted):
    assert getattr(parse_config(changed(FLASH, changes)), field) == wanted


@pytest.mark.parametrize(
    ("base", "changes", "fact"),
    [
        (FLASH, {"zebra": 1}, "zebra is not a key"),
        (FLASH, {"hidden_size": ABSENT}, "hidden_size is missing"),
        (FLASH, {"hidden_size": "4096"}, "hidden_size is '4096'"),
        (FLASH, {"hidden_size": 4096.0}, "hidden_size is 4096.0"),
        (FLASH, {"vocab_size": True}, "vocab_size is True"),
        (FLASH, {"hc_eps": float("inf")}, "hc_eps is inf"),
        (FLASH, {"rms_norm_eps": 0}, "rms_norm_eps is 0.0"),
        (FLASH, {"head_dim": 0}, "head_dim is 0"),
        (FLASH, {"index_topk": 0}, "index_topk is 0"),
        (FLASH, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (FLASH, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (FLASH, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (FLASH, {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (FLASH, {"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        (FLASH, {"attention_bias": True}, "attention_bias is True"),
        (FLASH, {"mlp_bias": True}, "mlp_bias is True"),
        (FLASH, {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        (FLASH, {"n_shared_experts": 2}, "n_shared_experts is 2"),
        (FLASH, {"expert_dtype": "int4"}, "expert_dtype is 'int4'"),
        (FLASH, {"architectures": ["Other"]}, "architectures is ['Other']"),
        (FLASH, {"quantization_config": 3}, "quantization_config is 3"),
        (FLASH, {"quantization_config/fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
        (FLASH, {"quantization_config/weight_block_size": [32, 32]}, "weight_block_size"),
        (FLASH, {"quantization_config/new": 1}, "quantization_config.new is not a key"),
        (FLASH, {"o_groups": 7}, "num_attention_heads 64 is not a multiple of o_groups 7"),
        (FLASH, {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        (FLASH, {"qk_rope_head_dim": 514}, "greater than head_dim 512"),
        (FLASH, {"qk_rope_head_dim": 130}, "greater than index_head_dim 128"),
        (FLASH, {"num_experts_per_tok": 257}, "greater than n_routed_experts 256"),
        (FLASH, {"num_hash_layers": 44}, "num_hash_layers 44 is greater"),
        (FLASH, {"eos_token_id": 129280}, "eos_token_id (129280,) is outside"),
        (FLASH, {"eos_token_id": [1, "2"]}, "eos_token_id is [1, '2']"),
        (FLASH, {"compress_ratios": ABSENT}, "compress_ratios is missing"),
        (FLASH, {"compress_ratios": [0, 8] * 22}, "compress_ratios holds [8]"),
        (FLASH, {"compress_ratios": [0] * 42}, "compress_ratios has 42 entries"),
        (FLASH, {"compress_ratios": [0] * 45}, "compress_ratios has 45 entries"),
        (
            FLASH,
            {"compress_ratios": [0] * 43 + [4]},
            "gives the MTP block, entry 43, the ratio 4; it must be 0",
        ),
        (FLASH, {"compress_rates": {"heavily_compressed_attention": 4}}, "is ambiguous"),
        (
            FLASH,
            {"layer_types": ["sliding_attention"] * 43},
            "layer_types and compress_ratios",
        ),
        (FLASH, {"num_hash_layers": ABSENT}, "num_hash_layers is missing"),
        (FLASH, {"mlp_layer_types": ["moe"] * 43}, "mlp_layer_types has 0 hash_moe layers"),
        (FLASH, {"rope_scaling/type": "linear"}, "rope type 'linear'"),
        (FLASH, {"rope_scaling/rope_type": "llama3"}, "rope type is given as 'llama3'"),
        (FLASH, {"rope_scaling/factor": ABSENT}, "rope_scaling.factor is missing"),
        (FLASH, {"rope_scaling/factor": 0.5}, "yarn factor is 0.5"),
        (FLASH, {"rope_scaling/attention_factor": 1.2}, "attention_factor is 1.2"),
        (FLASH, {"rope_scaling/mscale": 1.0}, "rope_scaling.mscale is not a key"),
        (FLASH, {"rope_scaling/beta_slow": 40}, "0 < beta_slow < beta_fast"),
        (FLASH, {"rope_scaling/original_max_position_embeddings": 0}, "yarn needs original"),
        (FLASH, {"rope_theta": 1}, "rope theta is 1.0"),
        (FLASH, {"compress_rope_theta": ABSENT}, "compress_rope_theta is missing"),
        (FLASH, {"partial_rotary_factor": 0.25}, "gives 128 dims, not 64"),
        (WRITTEN, {"layer_types": ["sliding_attention"] * 5}, "layer_types has 5 entries"),
        (WRITTEN, {"layer_types": ["full_attention"] * 6}, "holds ['full_attention']"),
        (WRITTEN, {"mlp_layer_types": ["moe", "hash_moe", *["moe"] * 4]}, "must come first"),
        (WRITTEN, {"mlp_layer_types": ["dense"] * 6}, "mlp_layer_types holds ['dense']"),
        (WRITTEN, {"compress_rates": {"full": 4}}, "compress_rates.full is not a key"),
        (WRITTEN, {"rope_scaling": {"type": "yarn"}}, "are both given"),
        (
            WRITTEN,
            {"rope_theta": 500.0},
            "rope_theta is 500.0, but rope_parameters says 10000",
        ),
        (WRITTEN, {"rope_parameters/compress": ABSENT}, "rope_parameters.compress is missing"),
        (WRITTEN, {"rope_parameters/other": {}}, "rope_parameters.other is not a key"),
        (
            WRITTEN,
            {"rope_parameters/main/partial_rotary_factor": 0.5},
            "gives 13 dims, not 10",
        ),
        (
            WRITTEN,
            {"rope_parameters/compress/attention_factor": ABSENT},
            "lacks attention_factor 1.0",
        ),
    ],
)
def test_each_fault_is_named(base, changes, fact):
    found = faults(changed(base, changes))
    assert any(fact in fault for fault in found), found


def test_a_nested_theta_beats_the_top_level_default_of_transformers():
    """What save_pretrained writes for a model that was made from nested values alone."""
    nested = {"rope_parameters/main/rope_theta": 500.0, "rope_theta": 10000.0}
    assert parse_config(changed(WRITTEN, nested)).rope_main == Rope(theta=500.0)


def test_one_change_gives_one_fault():
    """A fault must not drag others along, so that the list can be worked off."""
    for changes in ({"hidden_size": "x"}, {"o_groups": 7}, {"rope_scaling/type": "linear"}):
        assert len(faults(changed(FLASH, changes))) == 1


def test_all_faults_come_at_once():
    changes = {
        "hc_mult": ABSENT,
        "zebra": 1,
        "hidden_act": "gelu",
        "o_groups": 7,
        "num_hash_layers": -1,
        "rope_scaling/type": "linear",
        "compress_ratios": [3] * 43,
    }
    assert len(faults(changed(FLASH, changes))) == len(changes)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"model_type": "deepseek_v41"}, "n-gram tables"),
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'"),
        ({"model_type": ABSENT}, "model_type is None"),
        ({"dspark_block_size": 5}, "dspark_block_size: DSpark drafters"),
        ({"compress_ratios": [0] * 46}, "46 entries for 43 layers: DSpark"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is 3: DSpark"),
        ({"vision_config": {}}, "vision_config: vision towers"),
        ({"vision_dim": 1024}, "vision_dim: vision towers"),
    ],
)
def test_other_architectures_are_refused_by_name_alone(changes, fact):
    found = faults(changed(FLASH, {**changes, "zebra": 1}))
    assert len(found) == 1
    assert fact in found[0]


def test_a_drafter_with_a_vision_tower_is_refused_for_both():
    assert len(faults(changed(FLASH, {"dspark_block_size": 5, "vision_dim": 1}))) == 2


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (None, "does not exist"),
        ("{", "is not JSON"),
        ("[1]", "holds a list"),
        (b"\xff", "JSON"),
    ],
)
def test_a_config_file_that_cannot_be_read(tmp_path: Path, content, fact):
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=fact):
        load_config(tmp_path)
