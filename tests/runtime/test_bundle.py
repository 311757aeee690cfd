"""Damaged bundles: each fault is one line that names it, in Python and on the command line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bundles import Bundles

from cachegraph.models.errors import ContractError
from cachegraph.models.manifest import MANIFEST_NAME
from cachegraph.runtime.bundle import open_bundle, verify
from cachegraph.runtime.engine import Engine
from cachegraph.tools import cli

pytestmark = pytest.mark.r1


@pytest.fixture
def bundle(bundles: Bundles, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    copy = tmp_path / "bundle"
    shutil.copytree(bundles.bundle(bundles.checkpoint()), copy)
    return copy


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(bundle: Path) -> None:
        file = bundle / MANIFEST_NAME
        manifest = json.loads(file.read_text())
        change(manifest)
        file.write_text(json.dumps(manifest))

    return damage


def wrote(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda bundle: (bundle / name).write_bytes(data) and None  # type: ignore[func-returns-value]


def removed(name: str) -> Callable[[Path], None]:
    return lambda bundle: (bundle / name).unlink()


def truncated(bundle: Path) -> None:
    file = bundle / "weights.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def other_header(bundle: Path) -> None:
    """A weights file of the same size with a tensor of another name."""
    file = bundle / "weights.safetensors"
    data = bytearray(file.read_bytes())
    at = data.index(b"layers.")
    data[at : at + 7] = b"LAYERS."
    file.write_bytes(data)


def no_format(manifest: dict[str, Any]) -> None:
    del manifest["format"]


def no_ladder(manifest: dict[str, Any]) -> None:
    del manifest["ladder"]


def no_streams(manifest: dict[str, Any]) -> None:
    del manifest["layouts"]["csa"]["streams"]


def new_version(manifest: dict[str, Any]) -> None:
    manifest["format_version"] = 2


def extra_field(manifest: dict[str, Any]) -> None:
    manifest["speed"] = "fast"


def odd_window(manifest: dict[str, Any]) -> None:
    manifest["planners"]["raw"]["window"] = "wide"


def odd_kind(manifest: dict[str, Any]) -> None:
    manifest["caches"][0]["kind"] = "warm"


def newer_runtime(manifest: dict[str, Any]) -> None:
    manifest["min_onnxruntime"] = "99.1.0"


def no_weights(manifest: dict[str, Any]) -> None:
    manifest["weights"] = None


def other_vocabulary(manifest: dict[str, Any]) -> None:
    row = next(r for r in manifest["tensors"] if r["name"] == "logits")
    row["shape"][1] = 7


def odd_rows_type(manifest: dict[str, Any]) -> None:
    manifest["cache_types"]["rows"] = "q4_0"


def odd_index_type(manifest: dict[str, Any]) -> None:
    manifest["cache_types"]["index"] = "q4_0"


def odd_element(manifest: dict[str, Any]) -> None:
    manifest["caches"][0]["dtype"] = "float8"


def odd_state_element(manifest: dict[str, Any]) -> None:
    entry = next(c for c in manifest["caches"] if c["kind"] == "csa_state")
    entry["dtype"] = "float8"


def blocks_that_do_not_fit(manifest: dict[str, Any]) -> None:
    manifest["cache_types"]["rows"] = "q8_0"


def half_state(manifest: dict[str, Any]) -> None:
    entry = next(c for c in manifest["caches"] if c["name"] == "cache.1.csa_state")
    entry["dtype"] = "float16"


def put(value: object, *place: str | int) -> Callable[[Path], None]:
    """Writes a value into the manifest."""

    def change(manifest: Any) -> None:
        for key in place[:-1]:
            manifest = manifest[key]
        manifest[place[-1]] = value

    return edited(change)


RAW, CSA, LADDER = ("planners", "raw"), ("planners", "compressors", 0), "ladder"
SIZES: dict[str, tuple[Callable[[Path], None], str]] = {
    "window 0": (put(0, *RAW, "window"), "the raw window is 0 rows"),
    "window -1": (put(-1, *RAW, "window"), "the raw window is -1 rows"),
    "pinned -1": (put(-1, *RAW, "pinned"), "-1 raw rows are pinned"),
    "ratio 0": (put(0, *CSA, "ratio"), "the csa plan has a ratio of 0 tokens"),
    "ratio -4": (put(-4, *CSA, "ratio"), "the csa plan has a ratio of -4 tokens"),
    "rewind -1": (put(-1, *CSA, "rewind"), "the csa plan has a rewind of -1 tokens"),
    "serves nothing": (put([], *CSA, "serves"), "the csa plan serves no cache of its kind"),
    "serves others": (
        put([["hca", "hca_state"]], *CSA, "serves"),
        "the csa plan serves no cache of its kind",
    ),
    "unit 0": (put(0, "planners", "context_unit"), "a row of the context rung is 0 tokens"),
    "unit -1": (put(-1, "planners", "context_unit"), "a row of the context rung is -1 tok"),
    "no streams": (put([], LADDER, "streams"), "the rungs of streams are (), wanted one or"),
    "no steps": (put([], LADDER, "steps"), "the rungs of steps are (), wanted one or more"),
    "no contexts": (put([], LADDER, "contexts"), "the rungs of contexts are (), wanted one"),
    "falling streams": (
        put([4, 2, 1], LADDER, "streams"),
        "the rungs of streams are (4, 2, 1), wanted one or more",
    ),
    "step 0": (put([0, 4], LADDER, "steps"), "the rungs of steps are (0, 4), wanted one or"),
    "raw rows -1": (
        put(-1, "layouts", "raw", "rows_per_stream"),
        "field 'layouts.raw': a stream has -1 rows, wanted 1 or more",
    ),
    "ring of 0": (put(0, "layouts", "hca_state", "rows_per_stream"), "a stream has 0 rows"),
    "no streams of rows": (put(0, "layouts", "csa", "streams"), "rows of 0 streams, wanted 1"),
    "spare rows -1": (
        put(-1, "layouts", "lid", "spare_rows"),
        "-1 spare rows, wanted 0 or more",
    ),
    "no layouts": (put({}, "layouts"), "manifest.json: cache.0.raw has no layout of raw rows"),
    "vocabulary 0": (put(0, "vocab_size"), "field 'vocab_size': Input should be greater than"),
}

FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (removed(MANIFEST_NAME), "is no bundle: it has no manifest.json"),
    "not JSON": (wrote(MANIFEST_NAME, b"{"), "is not JSON"),
    "not text": (wrote(MANIFEST_NAME, b"\xff\xfe\x00"), "is not JSON"),
    "a list": (wrote(MANIFEST_NAME, b"[]"), "is no cachegraph manifest"),
    "no format": (edited(no_format), "is no cachegraph manifest"),
    "other version": (edited(new_version), "has format version 2; this cachegraph reads 1"),
    "missing field": (edited(no_ladder), "field 'ladder': Field required"),
    "missing inner field": (edited(no_streams), "field 'layouts.csa.streams'"),
    "unknown field": (edited(extra_field), "field 'speed'"),
    "wrong type": (edited(odd_window), "field 'planners.raw.window'"),
    "unknown kind": (edited(odd_kind), "field 'caches.0.kind'"),
    "unknown type of rows": (
        edited(odd_rows_type),
        "raw, csa and hca cache: no type 'q4_0'; it can be f32, f16, bf16, q8_0",
    ),
    "unknown type of index keys": (
        edited(odd_index_type),
        "lid cache: no type 'q4_0'; it can be f32, f16, bf16, q8_0",
    ),
    "unknown element type": (
        edited(odd_element),
        "layer 0 raw cache: no type 'float8'; it can be f32, f16, bf16, q8_0",
    ),
    "unknown element type of a state ring": (
        edited(odd_state_element),
        "layer 1 csa_state cache: no type 'float8'; it can be f32; choose one",
    ),
    "q8_0 of an odd width": (
        edited(blocks_that_do_not_fit),
        "raw cache: q8_0 stores rows in blocks of 32 values, and the width 20",
    ),
    "a state ring of f16": (
        edited(half_state),
        "cache.1.csa_state: the manifest has cache.1.csa_state of 80 float16, a csa_state "
        "cache of type f32 is cache.1.csa_state of 80 float32",
    ),
    "newer runtime": (edited(newer_runtime), "needs ONNX Runtime 99.1.0 or newer"),
    "no weights": (edited(no_weights), "was exported without weights"),
    "other graph": (edited(other_vocabulary), "logits: the graph has"),
    "no template": (removed("template.onnx"), "template.onnx is missing"),
    "no weights file": (removed("weights.safetensors"), "weights.safetensors is missing"),
    "truncated": (truncated, "the file is cut off or was changed"),
    "other weights": (
        other_header,
        "is not the weights file that this bundle was written with",
    ),
    **SIZES,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_bundle_is_one_line_and_nothing_is_changed(
    bundle: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = FAULTS[name]
    damage(bundle)
    before = {file: file.read_bytes() for file in bundle.iterdir()}
    with pytest.raises(ContractError) as caught:
        Engine.load(bundle, device="cpu")
    assert message in str(caught.value)
    assert cli.main(["generate", str(bundle), "--prompt", "x"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"error: {caught.value}\n"
    assert shown.err.count("\n") == 1
    assert {file: file.read_bytes() for file in bundle.iterdir()} == before


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_place_that_is_no_folder_is_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ContractError, match=r"is no bundle|is a file; a bundle is a folder"):
        open_bundle(tmp_path / name)
    assert cli.main(["generate", str(tmp_path / name), "--prompt", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_changed_weight_is_found_by_verify_alone(bundle: Path) -> None:
    """An open checks size and header; the hash is of the whole file."""
    verify(bundle)
    file = bundle / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    open_bundle(bundle)
    with pytest.raises(ContractError, match=r"sha256 .* the manifest says .* was changed"):
        verify(bundle)


def test_a_bundle_is_opened_through_links(bundle: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(bundle)
    folder, _ = open_bundle(link)
    assert folder == bundle.resolve()
