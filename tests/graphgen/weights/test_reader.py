"""A whole checkpoint: every storage form and spelling, every fault at once, bounded memory."""

from __future__ import annotations

import re
import tracemalloc
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import tiny
from support.raw_safetensors import Stored, plain, stored, write_file, write_sharded

from cachegraph.graphgen.weights.dequant import (
    decode_scales,
    dequantize_fp4,
    dequantize_fp8,
    fp4_shapes,
    fp8_grid,
)
from cachegraph.graphgen.weights.files import SINGLE, read_folder
from cachegraph.graphgen.weights.match import Form
from cachegraph.graphgen.weights.reader import open_checkpoint
from cachegraph.models import shipped
from cachegraph.models.deepseek_v4.checkpoint import checkpoint_table
from cachegraph.models.deepseek_v4.config import LayerKind
from cachegraph.models.deepseek_v4.draft_tensors import draft_table, has_draft
from cachegraph.models.deepseek_v4.parse import load_config
from cachegraph.models.deepseek_v4.tensors import expert_name, tensor_table
from cachegraph.models.errors import CheckpointError
from cachegraph.models.tensor_specs import TensorKind

pytestmark = pytest.mark.r0

# Several FP8 blocks and FP4 groups a side, the last ones cut short.
PACKED = tiny.tiny_config(
    layer_kinds=(LayerKind.WINDOW, LayerKind.CSA),
    hidden_size=300,
    expert_size=70,
    num_heads=3,
    head_dim=46,
    q_lora_rank=131,
    num_experts=3,
    experts_per_token=2,
)
SMALL = tiny.tiny_config()


def float_tensors(config, dtype=np.float32) -> dict[str, Stored]:
    values = tiny.random_tensors(config, 5)
    return {
        name: plain(array if array.dtype == np.int64 else array.astype(dtype))
        for name, array in values.items()
    }


def packed_tensors(
    config,
    scale_dtype="F8_E8M0",
    scale_leaf=".scale",
    experts=Form.FP4,
    with_draft=False,
):
    """The published mix: FP8 projections, packed experts, BF16 for the rest, F32 parameters."""
    rng = np.random.default_rng(7)
    tensors: dict[str, Stored] = {}
    wanted: dict[str, np.ndarray] = {}
    values = tiny.random_tensors(config, 5, with_draft=with_draft)
    for spec in table(config, with_draft):
        form = {TensorKind.MATRIX: Form.FP8, TensorKind.EXPERT: experts}.get(spec.kind)
        if form is None:
            is_half = spec.kind is TensorKind.FLOAT_MATRIX
            array = (
                values[spec.name].astype(ml_dtypes.bfloat16) if is_half else values[spec.name]
            )
            tensors[spec.name] = plain(array)
            wanted[spec.name] = array.astype(np.float32) if is_half else array
            continue
        rows, columns = spec.shape
        grid = fp8_grid(rows, columns) if form is Form.FP8 else fp4_shapes(rows, columns)[1]
        shape = spec.shape if form is Form.FP8 else fp4_shapes(rows, columns)[0]
        codes = rng.integers(0, 127, shape, np.uint8)
        scale = rng.integers(118, 130, grid, np.uint8)
        decoded = decode_scales("", scale.ravel(), "U8").reshape(grid)
        unpack = dequantize_fp8 if form is Form.FP8 else dequantize_fp4
        wanted[spec.name] = unpack(codes.ravel(), decoded, columns)
        tensors[spec.name] = stored("F8_E4M3" if form is Form.FP8 else "I8", codes)
        scale_name = spec.name.removesuffix(".weight") + scale_leaf
        if scale_dtype in ("F8_E8M0", "U8"):
            tensors[scale_name] = stored(scale_dtype, scale)
        else:
            name = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}[scale_dtype]
            tensors[scale_name] = plain(decoded.astype(name))
    return tensors, wanted


def table(config, with_draft):
    return (*tensor_table(config), *(draft_table(config) if with_draft else ()))


def check(folder: Path, config, wanted, with_draft=False) -> None:
    checkpoint = open_checkpoint(folder, checkpoint_table(config, with_draft=with_draft))
    names = [spec.name for spec in table(config, with_draft)]
    assert [spec.name for spec in checkpoint.specs] == names
    for spec in checkpoint.specs:
        read = checkpoint.read(spec.name)
        assert read.shape == spec.shape
        assert read.dtype == (np.int64 if spec.kind is TensorKind.TABLE else np.float32)
        assert read.flags.c_contiguous
        assert read.flags.writeable
        np.testing.assert_array_equal(read, wanted[spec.name], spec.name)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_random_tiny_checkpoints_match_their_config(tmp_path: Path, name):
    folder = tiny.random_checkpoint(tmp_path / "c", seed=5, name=name)
    check(folder, load_config(folder), tiny.random_tensors(tiny.tiny_config(name), 5))


def test_the_shipped_checkpoint_matches_its_config():
    folder = shipped.resolve("tiny:deepseek_v4")
    checkpoint = open_checkpoint(folder, checkpoint_table(load_config(folder)))
    assert len(checkpoint.specs) == 314
    assert "layers.0.attn.kv_norm.weight" in checkpoint


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision(tmp_path: Path, dtype):
    write_file(tmp_path / SINGLE, float_tensors(SMALL, dtype))
    wanted = {
        name: array if array.dtype == np.int64 else array.astype(dtype).astype(np.float32)
        for name, array in tiny.random_tensors(SMALL, 5).items()
    }
    check(tmp_path, SMALL, wanted)


@pytest.mark.parametrize(
    ("scale_dtype", "scale_leaf", "experts"),
    [
        ("F8_E8M0", ".scale", Form.FP4),
        ("U8", ".scale", Form.FP4),
        ("F8_E8M0", ".weight_scale_inv", Form.FP8),
        ("F32", ".weight_scale_inv", Form.FP8),
        ("BF16", ".scale", Form.FP4),
    ],
)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_packed_forms(tmp_path: Path, scale_dtype, scale_leaf, experts, num_shards):
    tensors, wanted = packed_tensors(PACKED, scale_dtype, scale_leaf, experts)
    tensors["mtp.0.e_proj.weight"] = plain(np.zeros((2, 2), np.float32))  # left out
    if num_shards == 1:
        write_file(tmp_path / SINGLE, tensors)
    else:
        write_sharded(tmp_path, tensors, num_shards)
    check(tmp_path, PACKED, wanted)
    checkpoint = open_checkpoint(tmp_path, checkpoint_table(PACKED))
    assert checkpoint.form("layers.0.attn.wkv.weight") is Form.FP8
    assert checkpoint.form(expert_name(0, 1, "w2")) is experts


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_packed_mtp_block(tmp_path: Path, prefix):
    """Packed as the main layers are; left out unless it is asked for."""
    tensors, wanted = packed_tensors(PACKED, with_draft=True)
    write_file(tmp_path / SINGLE, {prefix + name: array for name, array in tensors.items()})
    assert has_draft(read_folder(tmp_path))
    check(tmp_path, PACKED, wanted, with_draft=True)
    check(tmp_path, PACKED, wanted)
    checkpoint = open_checkpoint(tmp_path, checkpoint_table(PACKED, with_draft=True))
    assert checkpoint.form("mtp.0.h_proj.weight") is Form.FP8
    assert checkpoint.form("mtp.0.ffn.experts.2.w3.weight") is Form.FP4


def test_a_damaged_mtp_block_is_one_list_of_faults(tmp_path: Path):
    tensors = {
        name: plain(array)
        for name, array in tiny.random_tensors(SMALL, 5, with_draft=True).items()
    }
    del tensors["mtp.0.hnorm.weight"]
    tensors["mtp.0.zebra"] = plain(np.zeros(1, np.float32))
    tensors["mtp.0.e_proj.weight"] = plain(np.zeros((40, 80), np.float32))
    write_file(tmp_path / SINGLE, tensors)
    open_checkpoint(tmp_path, checkpoint_table(SMALL))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path, checkpoint_table(SMALL, with_draft=True))
    for fact in (
        "mtp.0.hnorm.weight [40]",
        "mtp.0.zebra",
        "mtp.0.e_proj.weight is F32 [40, 80], wanted [40, 40]",
    ):
        assert fact in str(caught.value), fact


def test_a_block_without_its_projection_is_none(tmp_path: Path):
    """What the config counts proves nothing, nor does another part of the block."""
    write_file(tmp_path / SINGLE, {"mtp.0.hnorm.weight": plain(np.zeros(40, np.float32))})
    assert not has_draft(read_folder(tmp_path))


RESPELLED = (
    (r"^embed\.", "embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^hc_head_", "hc_head.hc_"),
    (r"attn\.indexer\.compressor\.", "self_attn.compressor.indexer."),
    (r"attn\.indexer\.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"),
    (r"attn\.indexer\.wq_b", "self_attn.compressor.indexer.q_b_proj"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"attn_sink", "sinks"),
    (r"(compressor|indexer)\.norm", r"\1.kv_norm"),
    (r"\.ape", ".position_bias"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_([ab])\.", r".o_\1_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"gate\.bias", "gate.e_score_correction_bias"),
    (r"shared_experts\.w1", "shared_experts.gate_proj"),
    (r"shared_experts\.w2", "shared_experts.down_proj"),
    (r"shared_experts\.w3", "shared_experts.up_proj"),
)


def in_memory_names(config) -> dict[str, Stored]:
    """The names that transformers has in memory, experts fused."""
    values = tiny.random_tensors(config, 5)
    tensors: dict[str, Stored] = {}
    for name, array in values.items():
        if ".experts." in name:
            continue
        for pattern, replacement in RESPELLED:
            name = re.sub(pattern, replacement, name)
        tensors[name if name.startswith("lm_head") else f"model.{name}"] = plain(array)
    for layer in range(config.num_layers):
        w1, w2, w3 = (
            np.stack([values[expert_name(layer, e, w)] for e in range(config.num_experts)])
            for w in ("w1", "w2", "w3")
        )
        gate_up = np.concatenate([w1, w3], axis=1)
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = plain(gate_up)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = plain(w2)
    return tensors


def test_the_names_of_transformers_in_memory(tmp_path: Path):
    write_file(tmp_path / SINGLE, in_memory_names(SMALL))
    check(tmp_path, SMALL, tiny.random_tensors(SMALL, 5))


def test_all_faults_come_at_once(tmp_path: Path):
    tensors = float_tensors(SMALL)
    del tensors["norm.weight"]
    del tensors["layers.1.attn.indexer.wq_b.weight"]
    tensors["layers.9.attn.wkv.weight"] = plain(np.zeros(3, np.float32))
    tensors["model.embed_tokens.weight"] = tensors["embed.weight"]
    tensors["layers.0.attn.wkv.weight"] = plain(np.zeros((20, 41), np.float32))
    tensors["layers.0.ffn.gate.tid2eid"] = plain(np.zeros((131, 3), np.float32))
    tensors["layers.0.attn.wq_a.weight"] = stored("F8_E4M3", np.zeros((24, 40), np.uint8))
    tensors["layers.0.attn_norm.weight"] = stored("F8_E4M3", np.zeros(40, np.uint8))
    write_file(tmp_path / SINGLE, tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path, checkpoint_table(SMALL))
    text = str(caught.value)
    assert str(tmp_path) in text
    for fact in (
        "missing (3)",
        "norm.weight [40]",
        "layers.1.attn.indexer.wq_b.weight [252, 24]",
        "layers.0.attn.wq_a.scale [1, 1]",
        "unexpected (2)",
        "model.embed_tokens.weight: the same tensor as embed.weight",
        "layers.9.attn.wkv.weight",
        "mis-shaped (3)",
        "layers.0.attn.wkv.weight is F32 [20, 41], wanted [20, 40]",
        "layers.0.ffn.gate.tid2eid is F32 [131, 3], wanted [131, 3] as I64 or I32",
        "layers.0.attn_norm.weight is F8_E4M3 [40]",
        "one revision of one checkpoint",
    ):
        assert fact in text, fact


def test_long_lists_are_cut_and_counted(tmp_path: Path):
    write_file(tmp_path / SINGLE, {"norm.weight": plain(np.zeros(40, np.float32))})
    with pytest.raises(CheckpointError, match=r"missing \(243\)(?s:.)*\.\.\. and 223 more"):
        open_checkpoint(tmp_path, checkpoint_table(SMALL))


@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [
        (
            "layers.0.attn.wkv.scale",
            stored("F8_E8M0", np.zeros((1, 2), np.uint8)),
            "mis-shaped",
        ),
        ("layers.0.attn.wkv.scale", stored("I8", np.zeros((1, 3), np.uint8)), "mis-shaped"),
        (
            "layers.0.ffn.experts.0.w1.weight",
            stored("I8", np.zeros((70, 149), np.uint8)),
            "w1.weight is I8",
        ),
        ("layers.0.attn_norm.scale", stored("F8_E8M0", np.zeros(3, np.uint8)), "unexpected"),
        (
            "layers.0.attn.wkv.weight",
            stored("I8", np.zeros((46, 150), np.uint8)),
            "mis-shaped",
        ),
    ],
)
def test_scales_and_packed_bytes_are_checked(tmp_path: Path, name, value, fact):
    tensors, _ = packed_tensors(PACKED)
    tensors[name] = value
    write_file(tmp_path / SINGLE, tensors)
    with pytest.raises(CheckpointError, match=fact):
        open_checkpoint(tmp_path, checkpoint_table(PACKED))


def test_fused_experts_are_checked(tmp_path: Path):
    tensors = in_memory_names(SMALL)
    tensors["model.layers.1.mlp.experts.down_proj"] = plain(np.zeros((7, 22, 40), np.float32))
    write_file(tmp_path / SINGLE, tensors)
    with pytest.raises(
        CheckpointError, match=r"down_proj is F32 \[7, 22, 40\], wanted \[7, 40"
    ):
        open_checkpoint(tmp_path, checkpoint_table(SMALL))


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("mtp.0.main_proj.weight", "DSpark"),
        ("mtp.1.attn.wkv.weight", "DSpark"),
        ("mtp.2.markov_head.markov_w1.weight", "DSpark"),
        ("model.layers.0.ffn.gate.bias_vl", "vision"),
        ("vision.blocks.0.weight", "vision"),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path: Path, name, fact):
    tensors = float_tensors(SMALL) | {name: plain(np.zeros(1, np.float32))}
    del tensors["norm.weight"]
    write_file(tmp_path / SINGLE, tensors)
    with pytest.raises(CheckpointError, match=fact) as caught:
        open_checkpoint(tmp_path, checkpoint_table(SMALL))
    assert name in str(caught.value)
    assert "missing" not in str(caught.value)


def test_a_nan_scale_names_its_tensor(tmp_path: Path):
    tensors, _ = packed_tensors(PACKED)
    tensors["layers.1.attn.wo_a.scale"] = stored("F8_E8M0", np.full((1, 1), 255, np.uint8))
    write_file(tmp_path / SINGLE, tensors)
    checkpoint = open_checkpoint(tmp_path, checkpoint_table(PACKED))
    checkpoint.read("layers.0.attn.wo_a.weight")
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.wo_a\.scale: 1 of 1"):
        checkpoint.read("layers.1.attn.wo_a.weight")


@pytest.mark.parametrize("wrong", [-1, 7])
def test_a_table_that_names_no_expert(tmp_path: Path, wrong):
    tensors = float_tensors(SMALL)
    table = np.zeros((131, 3), np.int64)
    table[5, 1] = wrong
    tensors["layers.0.ffn.gate.tid2eid"] = plain(table)
    write_file(tmp_path / SINGLE, tensors)
    with pytest.raises(CheckpointError, match=r"tid2eid holds .*, wanted 0 to 6"):
        open_checkpoint(tmp_path, checkpoint_table(SMALL)).read("layers.0.ffn.gate.tid2eid")


def test_an_unknown_name_is_refused(tmp_path: Path):
    write_file(tmp_path / SINGLE, float_tensors(SMALL))
    with pytest.raises(CheckpointError, match=r"no tensor 'layers\.0\.zebra'"):
        open_checkpoint(tmp_path, checkpoint_table(SMALL)).read("layers.0.zebra")


def test_reading_one_by_one_holds_little_memory(tmp_path: Path):
    """Peak of reading everything: at most twice the largest tensor, whatever its form.

    The largest is several bands of rows high, so that unpacking it in one go would show.
    """
    one = {"layer_kinds": (LayerKind.WINDOW,), "num_experts": 1, "experts_per_token": 1}
    for config in (
        tiny.tiny_config(**one, hidden_size=600, expert_size=900),  # FP4 is largest
        tiny.tiny_config(**one, hidden_size=90, vocab_size=5000),  # BF16
        tiny.tiny_config(**one, num_heads=30, head_dim=60, q_lora_rank=300),  # FP8
    ):
        folder = tmp_path / str(config.hidden_size) / str(config.num_heads)
        write_file(folder / SINGLE, packed_tensors(config)[0])
        largest = max(prod(spec.shape) for spec in tensor_table(config)) * 4
        checkpoint = open_checkpoint(folder, checkpoint_table(config))
        tracemalloc.start()
        for spec in checkpoint.specs:
            checkpoint.read(spec.name)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= 2 * largest
