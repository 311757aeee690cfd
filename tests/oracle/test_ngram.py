"""Hashed n-gram ids against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from cachegraph.models.ngram_spec import ngram_spec
from cachegraph.runtime.planners.ngram import plan_ngram

pytestmark = pytest.mark.r3


@pytest.mark.parametrize("module", [0, 1])
def test_ids_are_those_of_transformers(module):
    config = Qwen4ExpTextConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        layer_types=["linear_attention"] * 2,
        ple_layer_ids=[1, 2],
        ple_embed_dim=64,
        ngram_size=3,
        heads_per_ngram=2,
        ngram_vocab_size_base=101,
        make_ngram_vocab_size_divisible_by=16,
        seed=1234,
        split_ngram_parts=4,
        head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=16,
        indexer_compress_ratio=4,
        bos_token_id=5,
        eos_token_id=5,
        pad_token_id=None,
    )
    theirs = Qwen4ExpTextNGramEmbedding(config, 64, layer_idx=module, ple_layer_index=module)
    seen = []
    theirs.ngram_embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    tokens = np.random.default_rng(3).choice([5, 7, 11, 96], 40)
    theirs(torch.tensor(tokens[None]), None)
    spec = ngram_spec(size=3, heads=2, base=101, vocab=97, seed=1234, module=module, end=5)
    assert theirs.layer_multipliers.tolist() == list(spec.multipliers)
    rows = plan_ngram(spec, tokens=tokens, streams=[0], histories={})
    assert rows.tolist() == seen[0][0].tolist()
