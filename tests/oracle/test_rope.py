"""RoPE frequencies against transformers: at position p an error of e turns a pair by p * e."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from cachegraph.models.deepseek_v4.config import Rope
from cachegraph.models.deepseek_v4.rope import inverse_frequencies

pytestmark = pytest.mark.r3

ONE_ULP = 2**-23


@pytest.mark.parametrize(("head_dim", "dims"), [(512, 64), (64, 32), (38, 18)])
def test_frequencies_are_those_of_transformers_to_the_last_bit(head_dim, dims):
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536}
    config = DeepseekV4Config(
        head_dim=head_dim,
        qk_rope_head_dim=dims,
        rope_parameters={**yarn, "beta_fast": 32, "beta_slow": 1},
        num_hidden_layers=2,
    )
    theirs = DeepseekV4RotaryEmbedding(config)
    main = inverse_frequencies(Rope(theta=10000.0), dims)
    compress = inverse_frequencies(
        Rope(theta=160000.0, factor=16.0, original_context=65536), dims
    )
    np.testing.assert_allclose(main, theirs.main_inv_freq.numpy(), rtol=ONE_ULP)
    np.testing.assert_allclose(compress, theirs.compress_inv_freq.numpy(), rtol=ONE_ULP)
