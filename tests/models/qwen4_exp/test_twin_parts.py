"""Parts of the twin against hand calculations, so that the oracle is not their only judge."""

from __future__ import annotations

from math import exp, log1p, sqrt

import numpy as np
import pytest
from support import qwen4_exp as tiny

from cachegraph.models.errors import CheckpointError
from cachegraph.models.ngram_spec import NgramSpec
from cachegraph.models.qwen4_exp.presets import preset_config
from cachegraph.models.qwen4_exp.twin import DeltaRun, forward
from cachegraph.models.qwen4_exp.twin_parts import (
    DeltaInputs,
    attend,
    causal_conv,
    choose_pools,
    delta_inputs,
    delta_rule,
    ngram_context,
    ngram_ids,
    rotary_angles,
    rotate_halves,
    seen_tokens,
)
from cachegraph.models.twin_tools import Choice, Tensors

pytestmark = pytest.mark.r0

CONFIG = tiny.tiny_config()
FLASH = preset_config("qwen3.8-flash-next")
HASH = NgramSpec(
    multipliers=(3, 5, 7), primes=(11, 13, 17, 19), offsets=(0, 11, 24, 41), end=9
)


@pytest.mark.parametrize(
    ("position", "context"),
    [
        (0, [1, 9, 9]),  # nothing before the start: ends, not zeros
        (1, [2, 1, 9]),
        (2, [9, 2, 1]),  # an end does not cut its own context
        (3, [3, 9, 9]),  # but that of the next token
        (4, [4, 3, 9]),
        (5, [5, 4, 3]),
    ],
)
def test_the_context_of_an_ngram(position, context):
    assert ngram_context(HASH, np.array([1, 2, 9, 3, 4, 5]), position) == context


def test_the_hash_of_a_token():
    two, three = 4 * 3 ^ 3 * 5, 4 * 3 ^ 3 * 5 ^ 9 * 7
    wanted = [two % 11, two % 13 + 11, three % 17 + 24, three % 19 + 41]
    assert ngram_ids(HASH, np.array([9, 3, 4]))[2].tolist() == wanted


def test_large_multipliers_do_not_overflow():
    """The largest token times the largest multiplier stays below 2^63."""
    ids = ngram_ids(FLASH.ngram(0), np.full(4, FLASH.vocab_size - 1))
    assert ids.dtype == np.int64
    assert (ids >= 0).all()
    assert (ids < 320001446).all()


def test_frequencies_of_the_release_take_turns():
    """y has 11 frequencies from 1 on, x 10 from 2 on, and t the rest."""
    places = np.eye(3, dtype=np.int64)
    angles = rotary_angles(FLASH, places)
    axes = (angles > 0).argmax(axis=0)
    assert (angles > 0).sum() == 32
    assert [np.flatnonzero(axes == axis).tolist() for axis in (1, 2)] == [
        list(range(1, 32, 3)),
        list(range(2, 30, 3)),
    ]
    assert angles[0, 3] == pytest.approx(1e7 ** (-6 / 64))


def test_halves_rotate_together_and_the_rest_stays():
    x = np.array([[1.0, 0.0, 3.0, 2.0, 5.0]])
    turned = rotate_halves(x, np.array([[np.pi / 2, np.pi]]))
    np.testing.assert_allclose(turned, [[-3.0, 0.0, 1.0, -2.0, 5.0]], atol=1e-15)


def test_frequencies_past_their_section_turn_by_t():
    config = tiny.tiny_config(head_dim=18, rotary_dim=16, mrope_section=(6, 1, 1))
    axes = (rotary_angles(config, np.eye(3, dtype=np.int64)) > 0).argmax(axis=0)
    assert axes.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def test_a_dilated_convolution_reads_every_third_token():
    x = np.arange(1.0, 11.0)[:, None]
    kernel = np.array([1000.0, 100.0, 10.0, 1.0]).reshape(1, 1, 4)
    out = causal_conv(x, kernel, dilation=3)[:, 0]
    assert out[2] == 3
    assert out[3] == 4 + 10 * 1
    assert out[9] == 10 + 10 * 7 + 100 * 4 + 1000 * 1


def test_the_delta_rule_replaces_what_a_key_holds():
    """With beta 1 and no decay, the second value stands where the first stood."""
    key = np.array([0.6, 0.8])
    ones = np.ones((2, 1))
    inputs = DeltaInputs(
        q=np.tile(key, (2, 1, 1)),
        k=np.tile(key, (2, 1, 1)),
        v=np.array([[[1.0, 2.0, 3.0]], [[7.0, 5.0, 4.0]]]),
        decay=ones,
        beta=ones,
    )
    out, states = delta_rule(inputs)
    np.testing.assert_allclose(out, inputs.v)
    np.testing.assert_allclose(states[1, 0], np.outer(key, [7.0, 5.0, 4.0]))


def test_decay_comes_before_the_change():
    inputs = DeltaInputs(
        q=np.ones((2, 1, 1)),
        k=np.ones((2, 1, 1)),
        v=np.array([[[4.0]], [[8.0]]]),
        decay=np.array([[0.1], [0.5]]),
        beta=np.array([[1.0], [0.25]]),
    )
    out, _ = delta_rule(inputs)
    assert out.ravel().tolist() == [4.0, 2.0 + 0.25 * (8.0 - 2.0)]


def test_key_heads_serve_value_heads_that_follow_each_other():
    config = tiny.tiny_config(linear_key_heads=2, linear_value_heads=6, linear_key_dim=1)
    weights = {
        "in_proj_a.weight": np.zeros((6, 64)),
        "in_proj_b.weight": np.zeros((6, 64)),
        "A_log": np.log(np.arange(1.0, 7.0)),
        "dt_bias": np.zeros(6),
    }
    mixed = np.concatenate([[3.0, -3.0], [5.0, -5.0], np.zeros(96)])[None]
    inputs = delta_inputs(config, Tensors(weights), np.zeros((1, 64)), mixed)
    np.testing.assert_allclose(inputs.k[0, :, 0], [1, 1, 1, -1, -1, -1], atol=1e-6)
    np.testing.assert_allclose(inputs.q[0, :, 0], [1, 1, 1, -1, -1, -1], atol=1e-6)
    softplus = log1p(1)
    np.testing.assert_allclose(inputs.decay[0, 2], exp(-3 * softplus))
    assert inputs.beta.tolist() == [[0.5] * 6]


def test_a_complete_pool_competes_with_the_others_and_the_tail_does_not():
    config = tiny.tiny_config(index_budget=4, index_head_dim=16)
    keys = np.zeros((3, 16))
    keys[:, 0] = [1.0, 3.0, 2.0]
    query = np.ones((1, 16))
    at_11 = choose_pools(config, query, keys, 11)
    assert at_11.ids.tolist() == [1]
    assert at_11.gap == pytest.approx(1 / sqrt(16))
    assert seen_tokens(config, at_11, 11).tolist() == [4, 5, 6, 7]  # itself not among them
    at_10 = choose_pools(config, query, keys, 10)  # the third pool is not complete
    assert seen_tokens(config, at_10, 10).tolist() == [4, 5, 6, 7, 8, 9, 10]


def test_equal_scores_go_to_the_earlier_pool():
    config = tiny.tiny_config(index_budget=8)
    chosen = choose_pools(config, np.ones((4, 16)), -np.ones((5, 16)), 19)
    assert chosen.ids.tolist() == [0, 1]
    assert chosen.gap == 0


def test_a_text_shorter_than_a_pool_sees_itself():
    nothing = Choice(ids=np.array([], np.int64), gap=np.inf)
    assert seen_tokens(CONFIG, nothing, 2).tolist() == [0, 1, 2]


def test_query_heads_that_follow_each_other_share_a_key_head():
    values = np.array([[[1.0], [2.0]]])  # one row, two key heads
    out = attend(np.ones((4, 1)), np.zeros((1, 2, 1)), values)
    assert out.ravel().tolist() == [1, 1, 2, 2]


def test_a_history_before_the_first_tokens_is_zero():
    run = DeltaRun(
        out=np.zeros((2, 1)),
        conv_inputs=np.array([[1.0], [2.0]]),
        states=np.zeros((2, 1, 1, 1)),
    )
    assert run.history(CONFIG, 0).ravel().tolist() == [0, 0, 0]
    assert run.history(CONFIG, 2).ravel().tolist() == [0, 1, 2]
    assert run.history(CONFIG, 1).ravel().tolist() == [0, 0, 1]


def test_a_missing_tensor_is_named():
    weights = tiny.random_tensors(CONFIG, 0)
    del weights["layers.2.linear_attn.dt_bias"]
    with pytest.raises(CheckpointError, match=r"layers\.2\.linear_attn\.dt_bias"):
        forward(CONFIG, weights, [1, 2, 3])
