"""The draft block and its training, on a fresh tiny model in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.masking_utils import create_sliding_window_causal_mask

from cachegraph.tools.dev.tiny.acceptance import accepted_in_steps, equal_on_text
from cachegraph.tools.dev.tiny.draft_block import (
    DraftBlock,
    read_block,
    run_main,
    start_from_main,
    unroll,
    write_block,
)
from cachegraph.tools.dev.tiny.draft_training import (
    DraftRecipe,
    DraftRow,
    draft_loss,
    train_block,
)
from cachegraph.tools.dev.tiny.network import load_model, new_model, save_f16
from cachegraph.tools.dev.tiny.schedule import Budget
from cachegraph.tools.dev.tiny.tokens import Ids

pytestmark = pytest.mark.r3

DRAFTS = 3
WINDOW = 64
VOCABULARY = 11  # so small that random weights often agree by chance


@pytest.fixture
def model() -> Any:
    """Random weights, a small vocabulary, nothing to train."""
    return new_model(vocab_size=VOCABULARY, seed=3).eval().requires_grad_(False)


@pytest.fixture
def block(model: Any) -> DraftBlock:
    """As training starts it."""
    made = DraftBlock(model.config)
    start_from_main(made, model)
    return made.eval()


def tokens(rows: int, count: int) -> Tensor:
    """[rows, count]"""
    return torch.randint(
        2, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(1)
    )


@torch.no_grad()
def drafted(block: DraftBlock, model: Any, texts: Tensor) -> list[Tensor]:
    """Logits of DRAFTS drafts."""
    return unroll(block, model, texts, run_main(model, texts)[1], DRAFTS)


def test_first_drafts_are_the_layer_under_the_masks_of_transformers(
    model: Any, block: DraftBlock
) -> None:
    """The same layer with the library's own window mask, over more tokens than the window."""
    texts = tokens(2, WINDOW + 30)
    streams = run_main(model, texts)[1][:, :-1]
    with torch.no_grad():
        embedded = model.model.embed_tokens(texts[:, 1:])
        mixed = block.mixed(embedded, streams)
        positions = torch.arange(mixed.shape[1])[None]
        mask = create_sliding_window_causal_mask(
            config=model.config,
            inputs_embeds=embedded,
            attention_mask=None,
            cache=None,
            position_ids=positions,
        )
        rotation = model.model.rotary_emb(embedded, position_ids=positions, layer_type="main")
        wanted = block.layer(
            mixed,
            position_embeddings={"main": rotation},
            position_ids=positions,
            attention_mask=mask,
        )
        logits = model.lm_head(block.headed(wanted))
    torch.testing.assert_close(drafted(block, model, texts)[0], logits, rtol=0, atol=1e-5)


def test_a_chain_sees_nothing_of_the_chains_after_it(model: Any, block: DraftBlock) -> None:
    """Cut behind the last token it reads, the text gives the same drafts."""
    texts = tokens(1, 40)
    every = drafted(block, model, texts)
    for chain in (0, 7, 30):
        cut = drafted(block, model, texts[:, : chain + 1 + DRAFTS])
        for one, other in zip(every, cut, strict=True):
            torch.testing.assert_close(one[:, chain], other[:, chain], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_later_draft_reads_the_pairs_and_its_own_chain_alone(
    model: Any, block: DraftBlock
) -> None:
    """Drafts of one chain, one row at a time behind the rows of the pairs."""
    texts, chain = tokens(1, WINDOW + 30), WINDOW + 20
    streams = run_main(model, texts)[1]
    embedded = model.model.embed_tokens(texts[:, 1 : chain + 2])
    rows = [block.mixed(embedded, streams[:, : chain + 1])]
    for draft in range(DRAFTS):
        stacked = torch.cat(rows, dim=1)
        count = stacked.shape[1]
        positions = torch.arange(1, count + 1)[None]
        ago = positions.T - positions
        mask = torch.zeros(count, count).masked_fill((ago < 0) | (ago >= WINDOW), -1e30)
        rotation = model.model.rotary_emb(stacked, position_ids=positions, layer_type="main")
        after = block.layer(
            stacked,
            position_embeddings={"main": rotation},
            position_ids=positions,
            attention_mask=mask[None, None],
        )[:, -1:]
        wanted = drafted(block, model, texts)[draft][:, chain]
        logits = model.lm_head(block.headed(after))[:, 0]
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
        if draft + 1 < DRAFTS:
            token = texts[:, chain + 2 + draft, None]
            rows.append(block.mixed(model.model.embed_tokens(token), after))


def test_a_written_block_comes_back_and_the_main_model_is_untouched(
    model: Any, block: DraftBlock, tmp_path: Path
) -> None:
    """Published names; main tensors as before; a second write replaces the first."""
    save_f16(model, tmp_path)
    before, logits = load_file(tmp_path / "model.safetensors"), _logits(tmp_path)
    write_block(block, tmp_path)
    write_block(block, tmp_path)
    after = load_file(tmp_path / "model.safetensors")
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert torch.equal(after[name], value)
    added = set(after) - set(before)
    assert {"mtp.0.e_proj.weight", "mtp.0.ffn.experts.7.w2.weight"} <= added
    assert {"mtp.0.attn.kv_norm.weight", "mtp.0.hc_head_fn", "mtp.0.ffn.gate.bias"} <= added
    assert all(name.startswith("mtp.0.") for name in added)
    assert after["mtp.0.h_proj.weight"].dtype == torch.float16
    assert after["mtp.0.hc_attn_fn"].dtype == torch.float32
    assert torch.equal(_logits(tmp_path), logits)
    back = read_block(model, tmp_path).state_dict()
    for name, value in block.state_dict().items():
        torch.testing.assert_close(back[name], value, rtol=1e-3, atol=1e-6)


@torch.no_grad()
def _logits(checkpoint: Path) -> Tensor:
    logits: Tensor = load_model(checkpoint)(tokens(1, 30), use_cache=False).logits
    return logits


def test_training_is_reproducible_and_leaves_the_main_model_alone(model: Any) -> None:
    """Two steps twice with one seed: the same block and log, losses that fall."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, rows = _trained(model)
    second, again = _trained(model)
    assert [row.equal for row in rows] == [row.equal for row in again]
    assert rows[1].loss < rows[0].loss
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def _trained(model: Any) -> tuple[nn.Module, list[DraftRow]]:
    torch.manual_seed(0)
    block = DraftBlock(model.config)
    start_from_main(block, model)
    recipe = DraftRecipe(tokens=40, batch=2, prompt=8, own_texts=2)
    stream: Ids = np.random.default_rng(2).integers(2, VOCABULARY, 200)
    rows: list[DraftRow] = []
    budget = Budget(steps=2)
    train_block(block, model, stream, recipe, budget, seed=4, done=rows.append)
    return block, rows


def test_marks_say_where_the_likeliest_tokens_agree(model: Any, block: DraftBlock) -> None:
    """Against both logits, pair by pair: draft i of chain j is about token j+2+i."""
    texts = tokens(2, 30)
    main, guessed = run_main(model, texts)[0], drafted(block, model, texts)
    marks = equal_on_text(block, model, texts, DRAFTS)
    assert marks.shape == (2, 27, DRAFTS)
    for draft in range(DRAFTS):
        wanted = main[:, 1 + draft : 28 + draft].argmax(-1)
        found = guessed[draft][:, :27].argmax(-1)
        assert (marks[:, :, draft] == (wanted == found).numpy()).all()
        assert 0 < marks[:, :, draft].sum() < marks[:, :, draft].size


@torch.no_grad()
def test_the_loss_is_each_drafts_cross_entropy_against_the_main_model(
    model: Any, block: DraftBlock
) -> None:
    """Draft i of chain j against the main model's distribution after token j+1+i."""
    texts = tokens(1, 20)
    main, guessed = run_main(model, texts)[0][0], drafted(block, model, texts)
    per_draft = []
    for draft, logits in enumerate(guessed):
        chains = range(logits.shape[1])
        losses = [
            cross_entropy(logits[0, chain], main[chain + 1 + draft].softmax(-1))
            for chain in chains
        ]
        per_draft.append(torch.stack(losses).mean())
    loss, equal = draft_loss(block, model, texts, DRAFTS)
    assert float(loss) == pytest.approx(float(torch.stack(per_draft).mean()), abs=1e-5)
    same = [main[1 + i :].argmax(-1) == one[0].argmax(-1) for i, one in enumerate(guessed)]
    assert equal == pytest.approx([float(marks.float().mean()) for marks in same])


def test_a_step_accepts_the_drafts_before_the_first_wrong_one() -> None:
    """By hand: 2 of 3, then on to the chain behind the model's own token, none, then all."""
    marks = np.zeros((8, 3), np.bool_)
    marks[1] = [True, True, False]
    marks[4] = [False, True, True]
    marks[5] = [True, True, True]
    assert accepted_in_steps(marks, 1) == [2, 0, 3]
