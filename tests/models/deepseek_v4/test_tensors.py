"""Names and shapes of the tensor table, and every spelling that leads to them."""

from __future__ import annotations

from math import prod

import pytest
from support import tiny

from cachegraph.models.deepseek_v4.presets import preset_config
from cachegraph.models.deepseek_v4.tensors import (
    canonical_name,
    expert_name,
    fused_parts,
    fused_shape,
    is_left_out,
    refusal,
    tensor_table,
)
from cachegraph.models.tensor_specs import TensorKind

pytestmark = pytest.mark.r0

FLASH = {spec.name: spec for spec in tensor_table(preset_config("deepseek-v4-flash"))}


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("embed.weight", (129280, 4096), "float_matrix"),
        ("hc_head_fn", (4, 16384), "parameter"),
        ("layers.0.hc_attn_fn", (24, 16384), "parameter"),
        ("layers.9.hc_ffn_base", (24,), "parameter"),
        ("layers.9.attn.attn_sink", (64,), "parameter"),
        ("layers.9.attn.wq_a.weight", (1024, 4096), "matrix"),
        ("layers.9.attn.wq_b.weight", (32768, 1024), "matrix"),
        ("layers.9.attn.wkv.weight", (512, 4096), "matrix"),
        ("layers.9.attn.wo_a.weight", (8192, 4096), "matrix"),
        ("layers.9.attn.wo_b.weight", (4096, 8192), "matrix"),
        ("layers.2.attn.compressor.wkv.weight", (1024, 4096), "float_matrix"),
        ("layers.3.attn.compressor.wgate.weight", (512, 4096), "float_matrix"),
        ("layers.2.attn.compressor.ape", (4, 1024), "parameter"),
        ("layers.3.attn.compressor.ape", (128, 512), "parameter"),
        ("layers.2.attn.indexer.wq_b.weight", (8192, 1024), "matrix"),
        ("layers.2.attn.indexer.weights_proj.weight", (64, 4096), "float_matrix"),
        ("layers.2.attn.indexer.compressor.wkv.weight", (256, 4096), "float_matrix"),
        ("layers.2.attn.indexer.compressor.ape", (4, 256), "parameter"),
        ("layers.2.ffn.gate.tid2eid", (129280, 6), "table"),
        ("layers.3.ffn.gate.bias", (256,), "parameter"),
        ("layers.42.ffn.experts.255.w1.weight", (2048, 4096), "expert"),
        ("layers.42.ffn.experts.255.w2.weight", (4096, 2048), "expert"),
        ("layers.42.ffn.shared_experts.w3.weight", (2048, 4096), "matrix"),
    ],
)
def test_flash_has_the_published_shapes(name, shape, kind):
    assert (FLASH[name].shape, FLASH[name].kind) == (shape, TensorKind(kind))


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.compressor.wkv.weight",  # window layer
        "layers.3.attn.indexer.wq_b.weight",  # HCA layer
        "layers.0.ffn.gate.bias",  # hash layer
        "layers.3.ffn.gate.tid2eid",  # scored layer
        "layers.43.attn.wkv.weight",  # the MTP block
    ],
)
def test_flash_lacks_what_a_layer_does_not_need(name):
    assert name not in FLASH


def test_flash_has_as_many_parameters_as_published():
    """284 billion, 13 of them active per token with 6 of 256 experts."""
    config = preset_config("deepseek-v4-flash")
    specs = [spec for spec in FLASH.values() if spec.kind is not TensorKind.TABLE]
    experts = sum(prod(spec.shape) for spec in specs if spec.kind is TensorKind.EXPERT)
    rest = sum(prod(spec.shape) for spec in specs if spec.kind is not TensorKind.EXPERT)
    share = config.experts_per_token / config.num_experts
    assert (experts + rest) / 1e9 == pytest.approx(284, abs=2)
    assert (experts * share + rest) / 1e9 == pytest.approx(13, abs=1)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("layers.1.attn.wq_a.weight", "layers.1.attn.wq_a.weight"),
        ("model.layers.1.attn.wq_a.weight", "layers.1.attn.wq_a.weight"),
        ("model.layers.1.self_attn.q_a_proj.weight", "layers.1.attn.wq_a.weight"),
        ("model.layers.1.attn.norm.weight", "layers.1.attn.kv_norm.weight"),
        ("model.layers.1.self_attn.kv_norm.weight", "layers.1.attn.kv_norm.weight"),
        ("layers.1.attn.compressor.norm.weight", "layers.1.attn.compressor.norm.weight"),
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("model.hc_head.hc_scale", "hc_head_scale"),
        ("model.layers.1.attn_hc.scale", "layers.1.hc_attn_scale"),
        ("model.layers.1.ffn_hc.fn", "layers.1.hc_ffn_fn"),
        ("layers.12.mlp.gate.e_score_correction_bias", "layers.12.ffn.gate.bias"),
        (
            "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight",
            "layers.1.attn.indexer.weights_proj.weight",
        ),
        (
            "model.layers.1.self_attn.compressor.indexer.kv_norm.weight",
            "layers.1.attn.indexer.compressor.norm.weight",
        ),
        ("model.layers.1.mlp.experts.gate_up_proj", "layers.1.ffn.experts.gate_up"),
        ("layers.1.attn.wq_a.scale", "layers.1.attn.wq_a.scale"),
        ("model.layers.1.attn.wq_a.weight_scale_inv", "layers.1.attn.wq_a.scale"),
        ("model.layers.1.self_attn.q_a_proj.weight_scale_inv", "layers.1.attn.wq_a.scale"),
        ("layers.1.ffn.experts.3.w2.scale", "layers.1.ffn.experts.3.w2.scale"),
        ("model.unheard.of", "unheard.of"),
    ],
)
def test_spellings(source, name):
    assert canonical_name(source) == name


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_our_own_names_are_fixed_points_and_unique(name):
    names = [spec.name for spec in tensor_table(tiny.tiny_config(name))]
    assert [canonical_name(each) for each in names] == names
    assert len(set(names)) == len(names)


def test_fused_parts_cover_the_fused_tensors_without_overlap():
    config = tiny.tiny_config()
    found = []
    for leaf in ("gate_up", "down"):
        name = f"layers.1.ffn.experts.{leaf}"
        shape = fused_shape(config, name)
        assert shape is not None
        rows = [
            (part.expert, row)
            for part in fused_parts(config, name)
            for row in range(part.first_row, part.first_row + part.num_rows)
        ]
        assert len(rows) == len(set(rows)) == shape[0] * shape[1]
        found += [part.name for part in fused_parts(config, name)]
    assert set(found) == {
        expert_name(1, expert, which)
        for expert in range(config.num_experts)
        for which in ("w1", "w2", "w3")
    }
    assert fused_shape(config, "layers.1.attn.wkv.weight") is None
    assert fused_parts(config, "layers.1.attn.wkv.weight") == ()


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("mtp.0.main_proj.weight", "DSpark"),
        ("mtp.2.markov_head.markov_w1.weight", "DSpark"),
        ("mtp.2.confidence_head.proj.weight", "DSpark"),
        ("layers.0.ffn.gate.bias_vl", "vision"),
        ("vision_tower.blocks.0.weight", "vision"),
        ("mtp.1.attn.wkv.weight", "DSpark"),  # an MTP block is one
        ("mtp.0.e_proj.weight", None),
        ("layers.0.attn.wkv.weight", None),
    ],
)
def test_tensors_of_other_architectures(name, fact):
    why = refusal(name)
    assert (why is None) if fact is None else (why is not None and fact in why)


def test_the_mtp_block_is_left_out():
    assert is_left_out("mtp.0.attn.wkv.weight")
    assert not is_left_out("layers.0.attn.wkv.weight")
