"""The indexer's own loss and the replaced selections, on a fresh tiny model in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cachegraph.tools.dev.tiny.network import load_model, new_model, save_f16
from cachegraph.tools.dev.tiny.probes import TrainingProbes, index_loss
from cachegraph.tools.dev.tiny.selection import Selection, selecting

pytestmark = pytest.mark.r3


@pytest.fixture
def model() -> nn.Module:
    """Random weights, a small vocabulary."""
    return new_model(vocab_size=97, seed=3).eval()


def tokens(count: int) -> Tensor:
    """[1, count]"""
    return torch.randint(2, 97, (1, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: nn.Module, selection: Selection, count: int, seed: int = 0) -> Tensor:
    """[1, count, vocabulary]"""
    with selecting(model, selection, seed):
        result: Tensor = model(tokens(count), use_cache=False).logits
    return result


def test_index_loss_trains_the_indexer_and_nothing_else(model: nn.Module) -> None:
    """Its inputs are detached and its target carries no gradient."""
    probes = TrainingProbes(model)
    probes.set_topk(8)
    model(tokens(160), use_cache=False, output_attentions=True)
    torch.autograd.backward(probes.index_loss())
    with_gradient = {
        name
        for name, p in model.named_parameters()
        if p.grad is not None and bool(p.grad.abs().sum() > 0)
    }
    assert with_gradient
    assert all(".indexer." in name for name in with_gradient)


def test_index_loss_is_the_cross_entropy_over_visible_blocks() -> None:
    """By hand: 8 tokens, 2 blocks; the first block is seen from token 3 on, both at token 7."""
    attention = torch.zeros(1, 1, 8, 10)
    attention[..., -2:] = torch.tensor([0.3, 0.1])
    scores = torch.tensor([2.0, 2.0]).expand(1, 8, 2)
    one_block, two_blocks = 0.0 * 0.75, float(torch.log(torch.tensor(2.0)))
    wanted = (4 * one_block + two_blocks) / 5
    assert float(index_loss(attention, scores)) == pytest.approx(wanted, abs=1e-6)


def test_routers_move_towards_experts_chosen_too_seldom(model: nn.Module) -> None:
    """The bias rises for an expert below the mean load and falls for one above it."""
    probes = TrainingProbes(model)
    model(tokens(64), use_cache=False, output_attentions=True)
    (router, chosen), *_ = probes._chosen.items()
    load = torch.bincount(chosen.flatten(), minlength=8).float()
    probes.balance_routers(0.5)
    bias = router.e_score_correction_bias
    assert isinstance(bias, Tensor)
    assert torch.equal(bias, 0.5 * torch.sign(load.mean() - load))


def test_selections_agree_while_every_block_fits_in_topk(model: nn.Module) -> None:
    """64 tokens have 16 blocks, as many as top-k: any choice is all of them."""
    learned = logits(model, Selection.LEARNED, 64)
    for selection in (Selection.RANDOM, Selection.RECENT, Selection.ALL):
        assert torch.equal(learned, logits(model, selection, 64))
    assert not torch.equal(learned, logits(model, Selection.NONE, 64))


def test_selections_differ_beyond_topk_and_leave_the_model_as_it_was(model: nn.Module) -> None:
    """Each selection gives its own logits at 160 tokens; afterwards the learned ones are back."""
    before = logits(model, Selection.LEARNED, 160)
    others = [
        logits(model, Selection.RANDOM, 160, seed=1),
        logits(model, Selection.RANDOM, 160, seed=2),
        logits(model, Selection.RECENT, 160),
        logits(model, Selection.ALL, 160),
        logits(model, Selection.NONE, 160),
    ]
    every = [before, *others]
    assert all(not torch.equal(a, b) for i, a in enumerate(every) for b in every[:i])
    assert torch.equal(before, logits(model, Selection.LEARNED, 160))


def test_saved_checkpoint_has_published_names_and_loads_back(
    model: nn.Module, tmp_path: Path
) -> None:
    """Big matrices are f16, the rest f32; nothing moves by more than f16 rounding."""
    from safetensors import safe_open

    save_f16(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        kinds = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert kinds["model.layers.1.attn.wq_a.weight"] == "F16"
    assert kinds["model.layers.1.attn.compressor.ape"] == "F32"
    assert kinds["model.layers.1.hc_attn_fn"] == "F32"
    back = dict(load_model(tmp_path).state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(back[name], value, rtol=1e-3, atol=1e-6)
