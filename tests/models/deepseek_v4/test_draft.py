"""The MTP block as models/ describes it: its tensors, its contract, its part of the manifest."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from support import tiny

from cachegraph.models.cache_types import CacheType, CacheTypes
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, DType, Planner, Role
from cachegraph.models.deepseek_v4.config import LayerKind
from cachegraph.models.deepseek_v4.contract import contract, ladder
from cachegraph.models.deepseek_v4.draft_contract import (
    CARRIED,
    draft_contract,
    draft_ladder,
    draft_planners,
    hidden_spec,
)
from cachegraph.models.deepseek_v4.draft_tensors import draft_table, has_draft
from cachegraph.models.deepseek_v4.parse import parse_config
from cachegraph.models.deepseek_v4.presets import PRESETS, preset_config
from cachegraph.models.deepseek_v4.tensors import canonical_name, tensor_table
from cachegraph.models.planner_specs import dims
from cachegraph.models.tensor_specs import PACKED_KINDS, TensorKind

pytestmark = pytest.mark.r0

FLASH = preset_config("deepseek-v4-flash")
TABLE = {spec.name: spec for spec in draft_table(FLASH)}
CAPACITY = Capacity(context=100, sequences=3, max_step=24, rewind=5)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("mtp.0.e_proj.weight", (4096, 4096), "matrix"),
        ("mtp.0.h_proj.weight", (4096, 4096), "matrix"),
        ("mtp.0.enorm.weight", (4096,), "parameter"),
        ("mtp.0.hnorm.weight", (4096,), "parameter"),
        ("mtp.0.norm.weight", (4096,), "parameter"),
        ("mtp.0.hc_head_fn", (4, 16384), "parameter"),
        ("mtp.0.hc_head_base", (4,), "parameter"),
        ("mtp.0.hc_head_scale", (1,), "parameter"),
        ("mtp.0.hc_attn_fn", (24, 16384), "parameter"),
        ("mtp.0.attn.wq_b.weight", (32768, 1024), "matrix"),
        ("mtp.0.attn.wkv.weight", (512, 4096), "matrix"),
        ("mtp.0.ffn.gate.bias", (256,), "parameter"),
        ("mtp.0.ffn.experts.255.w2.weight", (4096, 2048), "expert"),
    ],
)
def test_flash_has_the_published_shapes(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert (TABLE[name].shape, TABLE[name].kind) == (shape, TensorKind(kind))


def test_flash_has_as_many_tensors_as_published() -> None:
    """1575 with the scales of packed ones; neither a compressor nor a token-to-expert table."""
    packed = sum(spec.kind in PACKED_KINDS for spec in TABLE.values())
    assert len(TABLE) + packed == 1575
    assert not [n for n in TABLE if "compressor" in n or "indexer" in n or "tid2eid" in n]
    assert not TABLE.keys() & {spec.name for spec in tensor_table(FLASH)}
    assert [canonical_name(name) for name in TABLE] == list(TABLE)


def test_the_block_is_there_when_its_projection_is() -> None:
    names = ["embed.weight", "mtp.0.attn.wkv.weight"]
    assert not has_draft(names)
    assert not has_draft([*names, "mtp.0.main_proj.weight", "mtp.1.e_proj.weight"])
    assert has_draft([*names, "mtp.0.e_proj.weight"])
    assert has_draft([*names, "model.mtp.0.e_proj.weight"])


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_the_draft_layer_has_its_own_settings(name: str) -> None:
    """Whatever the main layers are: window attention, main RoPE, experts by score."""
    config = tiny.tiny_config(name)
    draft = config.draft
    assert draft.layer_kinds == (LayerKind.WINDOW,)
    assert not draft.is_hash(0)
    assert draft.rope(draft.layer_kinds[0]) == config.rope_main
    assert (draft.sliding_window, draft.hc_mult) == (config.sliding_window, config.hc_mult)


@pytest.mark.parametrize("nextn", [0, 1])
@pytest.mark.parametrize("own", [(), (0,)])
def test_its_own_ratio_may_be_written_whatever_the_count_says(
    nextn: int, own: tuple[int, ...]
) -> None:
    ratios = [0, 0, *[4, 128] * 20, 4, *own]
    raw = {**PRESETS["deepseek-v4-flash"], "compress_ratios": ratios}
    config = parse_config({**raw, "num_nextn_predict_layers": nextn})
    assert (config.layer_kinds, config.num_nextn_layers) == (FLASH.layer_kinds, nextn)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_the_contract_holds_raw_rows_only(name: str) -> None:
    """One cache behind the main layers', laid out as theirs; no plan but the raw one."""
    config = tiny.tiny_config(name)
    main, draft = contract(config, CAPACITY), draft_contract(config, CAPACITY)
    wide = config.hc_mult * config.hidden_size
    assert [row.name for row in draft.rows if row.role in (Role.BATCH, Role.CARRIED)] == [
        "tokens",
        "positions",
        "out_rows",
        CARRIED,
    ]
    assert {row.planner for row in draft.host_rows} == {Planner.BATCH, Planner.RAW}
    assert draft.host_rows == tuple(
        row for row in main.host_rows if row.planner in (Planner.BATCH, Planner.RAW)
    )
    carried = draft[CARRIED]
    assert (carried.dtype, carried.shape, carried.is_output) == (
        DType.FLOAT32,
        ("T", wide),
        False,
    )
    assert [(r.name, r.shape) for r in draft.outputs] == [
        ("logits", ("O", config.vocab_size)),
        ("streams", ("T", wide)),
        (f"cache.{config.num_layers}.raw.out", draft.caches[0].shape),
    ]
    (cache,) = draft.caches
    assert cache.layout == main.layout(CacheKind.RAW)
    assert cache.name not in {spec.name for spec in main.caches}


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_every_size_of_a_draft_call_follows_from_its_planners(name: str) -> None:
    """The rungs of streams and steps are the main ones; nothing compressed has a dimension."""
    config = tiny.tiny_config(name)
    planners, rungs = draft_planners(config, CAPACITY), draft_ladder(config, CAPACITY)
    main = ladder(config, CAPACITY)
    assert (rungs.streams, rungs.steps, rungs.contexts) == (main.streams, main.steps, (1,))
    assert planners.compressors == ()
    bucket = rungs.pick(streams=2, step=3, context=1)
    sizes = dims(planners, bucket)
    assert sizes == {"S": 2, "P": 4, "T": 8, "O": 2, "W": config.sliding_window + 4}
    for row in draft_contract(config, CAPACITY).rows:
        assert all(size > 0 for size in row.resolve(sizes)), row.name


def test_the_main_contract_gains_one_result_and_nothing_else() -> None:
    config = tiny.tiny_config()
    plain = contract(config, CAPACITY)
    wide = contract(config, CAPACITY, with_streams=True)
    added = [row for row in wide.rows if row not in plain.rows]
    assert [(row.name, row.role) for row in added] == [("streams", Role.RESULT)]
    assert tuple(row for row in wide.rows if row not in added) == plain.rows
    assert wide.caches == plain.caches


def test_the_draft_cache_has_the_type_of_the_rows() -> None:
    config = tiny.tiny_config(head_dim=64)
    types = CacheTypes(rows=CacheType.Q8_0)
    found = [(s.name, s.dtype) for s in draft_contract(config, CAPACITY, types).caches]
    assert found == [("cache.5.raw", DType.INT8), ("cache.5.raw.scales", DType.FLOAT16)]


def test_hidden_rows_reach_back_as_far_as_a_rewind() -> None:
    hidden = hidden_spec(tiny.tiny_config(), CAPACITY)
    assert (hidden.rows, hidden.width, hidden.dtype) == (6, 160, DType.FLOAT32)
    assert hidden.num_bytes == 6 * 160 * 4


def test_flash_drafts_with_2_percent_of_the_weights() -> None:
    block = sum(prod(spec.shape) for spec in TABLE.values())
    main = sum(prod(spec.shape) for spec in tensor_table(FLASH))
    assert 0.02 < block / main < 0.025


def test_the_draft_pins_no_rows_and_shares_none() -> None:
    """Pinned and unified rows are the main graph's; the block's own window is as it was."""
    config = tiny.tiny_config()
    pinned = replace(CAPACITY, pinned=3)
    assert draft_planners(config, pinned) == draft_planners(config, CAPACITY)
    assert draft_contract(config, pinned) == draft_contract(config, CAPACITY)
