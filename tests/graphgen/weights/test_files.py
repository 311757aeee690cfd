"""Safetensors files: what is read, and every way in which a download can be damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.raw_safetensors import plain, write_file, write_sharded

from cachegraph.graphgen.weights.files import INDEX, SINGLE, read_folder, read_header
from cachegraph.models.errors import CheckpointError

pytestmark = pytest.mark.r0

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(5, dtype=np.int64)
TENSORS = {"a": plain(A), "b": plain(B)}


def test_a_file_of_the_library_is_read(tmp_path: Path):
    save_file({"a": A, "b": B}, tmp_path / SINGLE)
    entries = read_folder(tmp_path)
    assert (entries["a"].dtype, entries["a"].shape) == ("F32", (3, 4))
    np.testing.assert_array_equal(entries["a"].read().view(np.float32).reshape(3, 4), A)
    np.testing.assert_array_equal(entries["b"].read().view(np.int64), B)


def test_a_run_of_items_is_read(tmp_path: Path):
    entry = read_header(write_file(tmp_path / SINGLE, TENSORS))["a"]
    assert entry.read(4, 3).view(np.float32).tolist() == [4, 5, 6]


def test_shards_are_read_through_their_index(tmp_path: Path):
    write_sharded(tmp_path, TENSORS, 2)
    entries = read_folder(tmp_path)
    assert {name: entry.path.name[:11] for name, entry in entries.items()} == {
        "a": "model-00001",
        "b": "model-00002",
    }


def test_an_empty_tensor_and_an_empty_file(tmp_path: Path):
    path = write_file(tmp_path / "x", {"none": plain(np.zeros((0, 4), np.float32))})
    assert read_header(path)["none"].read().size == 0
    assert read_header(write_file(tmp_path / "y", {})) == {}


def header_of(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewrite(path: Path, header: object, body: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.mark.parametrize("cut", [0, 3, 8, 40, -1])
def test_a_file_cut_short_anywhere(tmp_path: Path, cut):
    path = write_file(tmp_path / SINGLE, TENSORS)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is damaged.*download"
    ) as caught:
        read_folder(tmp_path)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda header: header["a"].update(dtype="F99"), "header row of a"),
        (lambda header: header["a"].pop("shape"), "header row of a"),
        (lambda header: header["a"].update(shape=[3, 5]), "a is F32"),
        (lambda header: header["a"].update(shape=[-3, -4]), "a is F32"),
        (lambda header: header["a"].update(data_offsets=[4, 52]), "overlap"),
        (lambda header: header["a"].update(data_offsets=[-48, 0]), "a is F32"),
        (lambda header: header.update(c=3), "header row of c"),
        (lambda header: header.pop("b"), "describes"),
        (lambda header: header.pop("a"), "leave bytes out"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, change, fact):
    path = write_file(tmp_path / SINGLE, TENSORS)
    header, body = header_of(path)
    change(header)
    rewrite(path, header, body)
    with pytest.raises(CheckpointError, match=fact):
        read_folder(tmp_path)


@pytest.mark.parametrize("header", [b"{nonsense", b"[1]", b"\xff\xfe"])
def test_a_header_that_is_no_object(tmp_path: Path, header):
    rewrite(tmp_path / SINGLE, header, b"")
    with pytest.raises(CheckpointError, match="the header is not"):
        read_folder(tmp_path)


def test_bytes_behind_the_last_tensor(tmp_path: Path):
    path = write_file(tmp_path / SINGLE, TENSORS)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="describes"):
        read_folder(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path):
    path = write_file(tmp_path / SINGLE, TENSORS)
    entry = read_folder(tmp_path)["b"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="b ends 8 bytes early"):
        entry.read()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        entry.read()


@pytest.mark.parametrize(
    ("index", "fact"),
    [
        ("{", "the index is not JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not a file name beside it"),
        ('{"weight_map": {"a": 3}}', "not a file name beside it"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors; download"),
        ('{"weight_map": {"a": "x.safetensors", "z": "x.safetensors"}}', "1 tensors.* z in x"),
    ],
)
def test_an_index_that_cannot_be_followed(tmp_path: Path, index, fact):
    write_file(tmp_path / "x.safetensors", TENSORS)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=fact):
        read_folder(tmp_path)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has neither .*; download"):
        read_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"it holds pytorch_model\.bin"):
        read_folder(tmp_path)
