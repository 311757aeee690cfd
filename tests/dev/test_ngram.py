"""The byte n-gram yardstick against a twin with dictionaries."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from cachegraph.tools.dev.tiny.ngram import MAX_ORDER, pack, train

pytestmark = pytest.mark.r0

FILES = (b"abracadabra abracadabra", b"import os\nimport sys\n", b"abcabcabd", b"q")


def naive_probability(files: tuple[bytes, ...], order: int, text: bytes) -> float:
    """P(last byte of text | the order - 1 before it), interpolated Kneser-Ney, by hand."""
    grams: Counter[bytes] = Counter()
    for data in files:
        padded = bytes(order - 1) + data
        grams.update(padded[i : i + order] for i in range(len(data)))
    tables = [grams]
    for _ in range(order - 1):
        tables.append(Counter(gram[1:] for gram in tables[-1]))  # distinct left neighbours
    result = 1 / 256
    for length, table in enumerate(reversed(tables), start=1):
        ones = sum(count == 1 for count in table.values())
        twos = sum(count == 2 for count in table.values())
        discount = ones / (ones + 2 * twos) if ones else 0.5
        gram = (bytes(order) + text)[-length:]
        followers = {g: c for g, c in table.items() if g[:-1] == gram[:-1]}
        total = sum(followers.values())
        if total:
            kept = max(followers.get(gram, 0) - discount, 0) / total
            result = kept + discount * len(followers) / total * result
    return result


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("text", [b"abracadabra", b"import re\n", b"zzz", b"a", b"\xff\x00a"])
def test_probabilities_equal_the_dictionary_twin(order: int, text: bytes) -> None:
    """Known and unknown contexts, starts of files, and bytes never seen."""
    wanted = [naive_probability(FILES, order, text[: i + 1]) for i in range(len(text))]
    assert train(FILES, order).probabilities(text) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("context", [b"", b"abra", b"impo", b"zzzz", b"xab"])
def test_probabilities_of_all_next_bytes_sum_to_one(context: bytes) -> None:
    """Interpolation hands on exactly the mass that discounting took."""
    model = train(FILES, 5)
    total = sum(model.probabilities(context + bytes([b]))[-1] for b in range(256))
    assert total == pytest.approx(1.0, abs=1e-12)


def test_bits_are_fewer_on_text_like_the_training_text() -> None:
    """A sanity check of the sign: seen text costs less than unseen, both less than 8 a byte."""
    model = train([b"the cat sat on the mat. " * 20], 5)
    seen, unseen = model.bits(b"the cat sat"), model.bits(b"zqxj wvkypg")
    assert 0 < seen < unseen


def test_pack_pads_with_nul_and_puts_the_last_byte_lowest() -> None:
    """Keys are big-endian n-grams ending at each byte."""
    assert pack(b"AB", 3).tolist() == [0x000041, 0x004142]
    assert pack(b"", 3).dtype == np.int64


@pytest.mark.parametrize("order", [0, MAX_ORDER + 1])
def test_order_out_of_range_is_refused(order: int) -> None:
    """An n-gram must fit an int64."""
    with pytest.raises(ValueError, match=f"order is {order}"):
        train(FILES, order)
