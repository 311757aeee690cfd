"""Names and shapes of the tensor table, and every spelling that leads to them."""

from __future__ import annotations

from math import prod

import pytest
from support import qwen4_exp as tiny

from cachegraph.models.qwen4_exp.presets import preset_config
from cachegraph.models.qwen4_exp.tensors import (
    canonical_name,
    checkpoint_table,
    expert_name,
    fused_experts,
    left_out_notes,
    left_out_part,
    ngram_shards,
    scale_name,
    tensor_table,
)
from cachegraph.models.tensor_specs import TensorKind

pytestmark = pytest.mark.r0

FLASH = {spec.name: spec for spec in tensor_table(preset_config("qwen3.8-flash-next"))}
TABLE = "layers.1.ple.ple_embedding.ngram_embedding"


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("embed_tokens.weight", (248320, 2560), "float_matrix"),
        ("lm_head.weight", (248320, 2560), "float_matrix"),
        ("hyper_connection_mixer.hc_norm.weight", (10240,), "parameter"),
        ("hyper_connection_mixer.input_mix_weight_down.weight", (320, 10240), "matrix"),
        (
            "layers.0.attn_hyper_connection.input_mix_weight_up.weight",
            (10240, 320),
            "matrix",
        ),
        (
            "layers.47.mlp_hyper_connection.block_inject_weight.weight",
            (4, 10240),
            "matrix",
        ),
        ("layers.0.linear_attn.in_proj_qkv.weight", (10240, 2560), "matrix"),
        ("layers.0.linear_attn.in_proj_z.weight", (6144, 2560), "matrix"),
        ("layers.0.linear_attn.in_proj_a.weight", (48, 2560), "matrix"),
        ("layers.0.linear_attn.conv1d.weight", (10240, 1, 4), "parameter"),
        ("layers.0.linear_attn.A_log", (48,), "parameter"),
        ("layers.0.linear_attn.norm.weight", (128,), "parameter"),
        ("layers.0.linear_attn.out_proj.weight", (2560, 6144), "matrix"),
        ("layers.3.self_attn.q_proj.weight", (12288, 2560), "matrix"),
        ("layers.3.self_attn.v_proj.weight", (512, 2560), "matrix"),
        ("layers.3.self_attn.o_proj.weight", (2560, 6144), "matrix"),
        ("layers.3.self_attn.k_norm.weight", (256,), "parameter"),
        ("layers.3.self_attn.indexer.index_qk_proj.weight", (640, 2560), "matrix"),
        ("layers.3.self_attn.indexer.k_layernorm.weight", (128,), "parameter"),
        ("layers.3.mlp.gate.weight", (512, 2560), "float_matrix"),
        ("layers.3.mlp.experts.511.gate_proj.weight", (640, 2560), "expert"),
        ("layers.3.mlp.experts.511.down_proj.weight", (2560, 640), "expert"),
        ("layers.3.mlp.shared_expert.up_proj.weight", (640, 2560), "matrix"),
        ("layers.3.mlp.shared_expert_gate.weight", (1, 2560), "matrix"),
        ("layers.1.ple.key_proj.weight", (10240, 2560), "matrix"),
        ("layers.1.ple.value_proj.weight", (2560, 2560), "matrix"),
        ("layers.1.ple.conv1d.weight", (10240, 1, 4), "parameter"),
        ("layers.1.ple.norm_conv.weight", (10240,), "parameter"),
        ("layers.1.ple.ple_embedding.layer_multipliers", (3,), "table"),
        (f"{TABLE}.shard_127.weight", (2500012, 160), "ngram"),
    ],
)
def test_the_release_has_the_published_shapes(name, shape, kind):
    assert (FLASH[name].shape, FLASH[name].kind) == (shape, TensorKind(kind))


@pytest.mark.parametrize(
    "name",
    [
        "norm.weight",  # no norm before the head
        "layers.0.input_layernorm.weight",
        "hyper_connection_mixer.block_inject_weight.weight",
        "layers.2.ple.key_proj.weight",  # the file counts n-gram layers from 1
        "layers.0.self_attn.q_proj.weight",
        "layers.3.linear_attn.A_log",
        f"{TABLE}.shard_128.weight",
    ],
)
def test_the_release_lacks_what_a_layer_does_not_need(name):
    assert name not in FLASH


def test_the_release_has_as_many_parameters_as_published():
    """125 billion, and 51 in the n-gram table."""
    table = sum(prod(x.shape) for x in FLASH.values() if x.kind is TensorKind.NGRAM)
    rest = sum(prod(x.shape) for x in FLASH.values() if x.kind is not TensorKind.NGRAM)
    assert table / 1e9 == pytest.approx(51.2, abs=0.05)
    assert rest / 1e9 == pytest.approx(125, abs=1)


def test_the_release_has_its_buffers_as_published():
    prefix = "layers.1.ple.ple_embedding."
    multipliers = (23703573157769, 20109073645365, 8052911324071)
    assert FLASH[f"{prefix}layer_multipliers"].values == multipliers
    primes = FLASH[f"{prefix}ngram_heads_vocab_sizes"].values
    assert primes is not None
    assert (len(primes), primes[0], primes[-1]) == (16, 20000003, 20000171)
    assert FLASH[f"{prefix}ngram_heads_offsets"].values[-1] + primes[-1] == 320001446


def test_all_norms_but_one_are_stored_less_one():
    norms = [
        x for x in FLASH.values() if "norm" in x.name.split(".")[-2] and len(x.shape) == 1
    ]
    plain = {x.name.split(".", 2)[2] for x in norms if not x.is_zero_centred}
    assert plain == {"linear_attn.norm.weight"}
    assert all(x in norms for x in FLASH.values() if x.is_zero_centred)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("model.language_model.layers.1.ple.key_proj.weight", "layers.1.ple.key_proj.weight"),
        ("model.layers.1.ple.key_proj.weight", "layers.1.ple.key_proj.weight"),
        ("layers.1.ple.key_proj.weight", "layers.1.ple.key_proj.weight"),
        ("model.language_model.embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.norm1.weight", "visual.blocks.0.norm1.weight"),
        ("mtp.fc_hidden.weight", "mtp.fc_hidden.weight"),
        ("model.unheard.of", "unheard.of"),
    ],
)
def test_spellings(source, name):
    assert canonical_name(source) == name


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_our_own_names_are_fixed_points_and_unique(name):
    table = checkpoint_table(tiny.tiny_config(name))
    names = [spec.name for spec in table.specs]
    assert [canonical_name(each) for each in names] == names
    assert len(set(names)) == len(names)
    assert not any(table.is_left_out(each) for each in names)


def test_shards_are_in_number_order_and_the_last_may_be_short():
    config = tiny.tiny_config("six", ngram_shards=11)
    table = {spec.name: spec.shape for spec in tensor_table(config)}
    names = ngram_shards(config, 4)
    assert names[9].endswith("shard_9.weight")
    assert names[10].endswith("shard_10.weight")
    rows = [table[name][0] for name in names]
    assert sum(rows) == config.ngram_rows(0)
    assert rows[0] == rows[9] > rows[10] > 0


def test_scales_follow_their_weights_and_shards_share_one():
    config = preset_config("qwen3.8-flash-next")
    assert scale_name(FLASH[expert_name(0, 1, "up")]) == (
        "layers.0.mlp.experts.1.up_proj.weight_scale_inv"
    )
    shared = {scale_name(FLASH[name]) for name in ngram_shards(config, 1)}
    assert shared == {f"{TABLE}.weight_scale"}


def test_fused_parts_cover_the_fused_tensors_without_overlap():
    config = tiny.tiny_config("six")
    found = []
    for leaf in ("gate_up_proj", "down_proj"):
        fused = fused_experts(config, f"layers.1.mlp.experts.{leaf}")
        assert fused is not None
        rows = [
            (part.expert, row)
            for part in fused.parts
            for row in range(part.first_row, part.first_row + part.num_rows)
        ]
        assert len(rows) == len(set(rows)) == fused.shape[0] * fused.shape[1]
        found += [part.name for part in fused.parts]
    assert set(found) == {
        expert_name(1, expert, which)
        for expert in range(config.num_experts)
        for which in ("gate", "up", "down")
    }
    assert fused_experts(config, "layers.1.mlp.experts.0.down_proj.weight") is None


def test_vision_and_mtp_are_left_out_with_a_note():
    assert left_out_part("visual.patch_embed.proj.weight") == "vision tower"
    assert left_out_part("mtp.layers.0.mlp.gate.weight") == "MTP block"
    assert left_out_part("layers.0.mlp.gate.weight") is None
    notes = left_out_notes(["model.visual.a", "model.visual.b", "mtp.c", "lm_head.weight"])
    assert [note.split(" is left out")[0] for note in notes] == [
        "the vision tower (2 tensors)",
        "the MTP block (1 tensors)",
    ]
    assert left_out_notes(["lm_head.weight"]) == ()
