"""The MTP block of a tiny DeepSeek-V4 in torch: its start, its unrolled drafts, its tensors.

The block's layer is transformers' own for a window layer with routed experts. What lies around
it follows the published weights: a pair is (streams H of token p after the last main layer, token
p+1), it stands at position p+1 and predicts token p+2. Knows nothing of training.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as published

from cachegraph.models.deepseek_v4.draft_tensors import DRAFT_PREFIX
from cachegraph.models.deepseek_v4.parse import load_config
from cachegraph.models.deepseek_v4.tensors import (
    canonical_name,
    fused_parts,
    fused_shape,
)
from cachegraph.tools.dev.tiny.network import WINDOW

# Both norms give rows of size 1. Streams as large as the main model's own (about 1.7) would begin
# by repeating its prediction of the token that is given; smaller ones learn much faster.
_START_E, _START_H = 0.5, 0.2


class DraftBlock(nn.Module):
    """X1 = layer(W_e RMS(embedding) + W_h RMS(streams)), and a head of its own before lm_head."""

    def __init__(self, main_config: Any) -> None:
        super().__init__()
        config = copy.deepcopy(main_config)
        config.num_hidden_layers = 1
        config.layer_types, config.mlp_layer_types = [WINDOW], ["moe"]
        size, eps = config.hidden_size, config.rms_norm_eps
        self.window: int = config.sliding_window
        self.enorm = published.DeepseekV4RMSNorm(size, eps)
        self.hnorm = published.DeepseekV4RMSNorm(size, eps)
        self.e_proj = nn.Linear(size, size, bias=False)
        self.h_proj = nn.Linear(size, size, bias=False)
        self.layer = published.DeepseekV4DecoderLayer(config, 0)
        self.hc_head = published.DeepseekV4HyperHead(config)
        self.norm = published.DeepseekV4RMSNorm(size, eps)

    def mixed(self, embedded: Tensor, streams: Tensor) -> Tensor:
        """Embeddings [B, T, D] and streams [B, T, M, D] of each pair -> X0 [B, T, M, D]."""
        token: Tensor = self.e_proj(self.enorm(embedded))
        carried: Tensor = self.h_proj(self.hnorm(streams))
        return token[:, :, None] + carried

    def headed(self, streams: Tensor) -> Tensor:
        """X1 [B, T, M, D] -> what the shared vocabulary head reads [B, T, D]."""
        result: Tensor = self.norm(self.hc_head(streams))
        return result


class _Chains:
    """Keys of the pairs and of every chain of drafts so far, where transformers has a cache."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []  # one per step: [B, 1, T of the step, head]

    def update(
        self, keys: Tensor, _values: Tensor, _layer: int, **_: object
    ) -> tuple[Tensor, Tensor]:
        self._keys.append(keys)
        every = torch.cat(self._keys, dim=2)
        return every, every


@torch.no_grad()
def start_from_main(block: DraftBlock, model: Any) -> None:
    """Start as the main model's last layer without its compressor, its head and its norm."""
    last = model.model.layers[-1].state_dict()
    block.layer.load_state_dict({name: last[name] for name in block.layer.state_dict()})
    block.hc_head.load_state_dict(model.model.hc_head.state_dict())
    block.norm.load_state_dict(model.model.norm.state_dict())
    for projection, scale in ((block.e_proj, _START_E), (block.h_proj, _START_H)):
        projection.weight.copy_(scale * torch.eye(len(projection.weight)))


@torch.no_grad()
def run_main(model: Any, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] of texts [B, T], and the streams [B, T, M, D] after the last layer."""
    kept: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda *call: kept.append(call[2]))
    try:
        logits: Tensor = model(texts, use_cache=False).logits
    finally:
        hook.remove()
    return logits, kept[0]


def unroll(
    block: DraftBlock, model: Any, texts: Tensor, streams: Tensor, drafts: int
) -> list[Tensor]:
    """Logits of the first, second, ... draft of every chain, with the text's own tokens.

    Chain j of T-1 starts at pair (streams j, token j+1). Its draft i predicts token j+2+i and
    reads token j+1+i and the X1 of the draft before. As when text is generated, it sees the
    pairs up to j and the earlier drafts of its own chain. Result i: [B, T-1-i, V].
    """
    chains, results = _Chains(), []
    for draft in range(drafts):
        count = texts.shape[1] - 1 - draft
        tokens = texts[:, 1 + draft :]
        positions = torch.arange(1 + draft, texts.shape[1])[None]
        mixed = block.mixed(model.model.embed_tokens(tokens), streams[:, :count])
        rotation = model.model.rotary_emb(mixed, position_ids=positions, layer_type="main")
        streams = block.layer(
            mixed,
            position_embeddings={"main": rotation},
            position_ids=positions,
            attention_mask=_mask(count, draft, block.window),
            cache=chains,
        )
        results.append(model.lm_head(block.headed(streams)))
    return results


def _mask(count: int, draft: int, window: int) -> Tensor:
    """0 where chain j sees a key, else the smallest float: [1, 1, count, keys of all steps]."""
    chain = torch.arange(count)[:, None]
    pair = torch.arange(count + draft)[None]
    seen = [(pair <= chain) & (chain + draft - pair < window)]
    seen += [torch.arange(count + draft - step)[None] == chain for step in range(1, draft + 1)]
    mask = torch.zeros(count, sum(part.shape[1] for part in seen))
    return mask.masked_fill(~torch.cat(seen, dim=1), torch.finfo(mask.dtype).min)[None, None]


def write_block(block: DraftBlock, checkpoint: Path) -> None:
    """Put the block into a checkpoint in place: tensors, and the count in config.json.

    Big matrices are f16, the rest f32, as in the main model, whose tensors stay as they are.
    """
    path, config_path = checkpoint / "model.safetensors", checkpoint / "config.json"
    tensors = load_file(path)
    for name, value in _named(block, checkpoint):
        is_half = value.ndim >= 2 and "hc_" not in name
        tensors[name] = value.half() if is_half else value.clone()
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["num_nextn_predict_layers"] = 1
    config_path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def read_block(model: Any, checkpoint: Path) -> DraftBlock:
    """The block of a checkpoint in f32, ready to evaluate."""
    block = DraftBlock(model.config)
    tensors = load_file(checkpoint / "model.safetensors")
    for name, value in _named(block, checkpoint):
        value.copy_(tensors[name])
    return block.eval()


def _named(block: DraftBlock, checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Views of the block's tensors under their published names, one per expert's matrix."""
    config = load_config(checkpoint)
    for own_name, value in block.state_dict().items():
        # canonical_name knows the tensors of a layer by its number, here any.
        name = canonical_name(own_name.replace("layer.", "layers.0.", 1))
        if fused_shape(config, name) is None:
            yield _prefixed(name), value
        for part in fused_parts(config, name):
            rows = slice(part.first_row, part.first_row + part.num_rows)
            yield _prefixed(part.name), value[part.expert, rows]


def _prefixed(name: str) -> str:
    return f"{DRAFT_PREFIX}." + name.removeprefix("layers.0.")
