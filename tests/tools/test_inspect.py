"""`cachegraph inspect`: a bundle described from its manifest, and its weights hashed on request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.bundles import Bundles, open_engine

from cachegraph.graphgen.static import StaticSize
from cachegraph.models.manifest import read_manifest
from cachegraph.tools.text_table import byte_words, columns

pytestmark = pytest.mark.r1
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bundle(bundles: Bundles) -> Path:
    return bundles.bundle(bundles.checkpoint(), static=(StaticSize(1, 1, 32),))


def test_every_tensor_cache_and_file_is_shown(bundle: Path, run: Run) -> None:
    code, out, err = run("inspect", bundle)
    assert (code, err) == (0, "")
    manifest = read_manifest(bundle)
    words = out.split()
    shown = [*(row.name for row in manifest.tensors), *manifest.dimensions, "template.onnx"]
    assert [name for name in shown if name not in words] == []
    assert manifest.weights is not None
    for fact in (
        "deepseek_v4: 5 layers, vocabulary 131",
        "100 tokens in each of 4 sequences",
        "24 tokens of a sequence in one graph call",
        "portable, opset 21",
        "f32, accuracy level 4",
        "spare of csa_state",
        "raw rows each stream reads, own ones too",
        "static graph: S=1 P=1 N=32",
        manifest.weights.sha256,
        byte_words(manifest.weights.num_bytes),
    ):
        assert fact in out, fact


def test_the_draft_is_one_line(bundles: Bundles, run: Run) -> None:
    """Raw rows of 4 sequences (252 x 20) and 9 carried rows of 160 each, in f32; and its file."""
    folder = bundles.bundle(bundles.checkpoint(with_draft=True))
    _, out, _ = run("inspect", folder)
    (line,) = [text for text in out.splitlines() if text.split()[:1] == ["draft"]]
    for fact in ("MTP block", "window 7", "9 carried rows of 160", byte_words(43200)):
        assert fact in line, fact
    assert "template of the draft graph" in out
    _, out, _ = run("inspect", bundles.bundle(bundles.checkpoint()))
    assert ["draft", "none"] in [text.split() for text in out.splitlines()]


def test_tables_of_the_host_are_a_file_of_their_own(
    bundles: Bundles, tmp_path: Path, run: Run
) -> None:
    """Exported with --ngram host, shown, and hashed with the weights."""
    out = tmp_path / "bundle"
    sizes = ("--context", "64", "--max-step", "8", "--static", "1x1x16")
    code, _, _ = run("export", bundles.qwen_checkpoint(), out, "--ngram", "host", *sizes)
    assert code == 0
    tables = read_manifest(out).ngram_tables
    assert tables is not None
    code, shown, _ = run("inspect", out, "--verify")
    assert code == 0
    (line,) = [text for text in shown.splitlines() if text.split()[:1] == [tables.file]]
    assert f"n-gram tables of the host, {byte_words(tables.num_bytes)}" in line
    assert tables.sha256 in line
    data = bytearray((out / tables.file).read_bytes())
    data[-1] ^= 1
    (out / tables.file).write_bytes(data)
    code, _, err = run("inspect", out, "--verify")
    assert code == 1
    assert tables.file in err


def test_memory_is_what_an_engine_allocates(bundle: Path, run: Run) -> None:
    code, out, _ = run("inspect", bundle, "--json")
    assert code == 0
    told = json.loads(out)["cache_bytes"]
    with open_engine(bundle) as engine:
        sizes = {
            spec: engine._store.caches[spec.name].array.nbytes
            for spec in engine.manifest.contract.caches
        }
    assert told["total"] == sum(sizes.values())
    for kind, count in told["by_kind"].items():
        assert count == sum(n for spec, n in sizes.items() if spec.kind.value == kind)
    for layer, count in told["by_layer"].items():
        assert count == sum(n for spec, n in sizes.items() if str(spec.layer) == layer)


def test_the_memory_table_has_the_type_of_every_kind(
    bundles: Bundles, tmp_path: Path, run: Run
) -> None:
    """A quantised cache is one row of the table, with all its parts in the bytes."""
    checkpoint = bundles.checkpoint(head_dim=96, index_head_dim=160)
    bundle, choice = tmp_path / "out", ("--cache", "q8_0", "--index-cache", "bf16")
    assert run("export", checkpoint, bundle, *choice)[0] == 0
    code, out, _ = run("inspect", bundle)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    found = {row[0]: row[1:3] for row in rows if row and row[0] in manifest_kinds(bundle)}
    assert found["raw"] == ["q8_0", "5"]
    assert found["csa"] == found["hca"] == ["q8_0", "2"]
    assert found["lid"] == ["bf16", "2"]
    assert found["csa_state"] == found["lid_state"] == found["hca_state"] == ["f32", "2"]
    assert "cache.1.csa.scales" in out


def manifest_kinds(bundle: Path) -> set[str]:
    return {kind.value for kind in read_manifest(bundle).layouts}


def test_json_is_the_manifest(bundle: Path, run: Run) -> None:
    _, out, err = run("inspect", bundle, "--json")
    assert err == ""
    assert json.loads(out)["manifest"] == json.loads((bundle / "manifest.json").read_text())


def test_a_bundle_without_weights_or_graphs_is_described(
    bundles: Bundles, tmp_path: Path, run: Run
) -> None:
    bundle = bundles.bundle(bundles.checkpoint())
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["weights"] = None
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    code, out, err = run("inspect", tmp_path)
    assert (code, err) == (0, "")
    assert "exported without weights: to inspect, not to run" in out
    code, out, err = run("inspect", tmp_path, "--verify")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_verify_tells_the_weights_that_were_exported(
    bundle: Path, tmp_path: Path, run: Run
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    code, out, err = run("inspect", copy, "--verify")
    assert code == 0
    assert err == "the weights are those that were exported\n"
    assert (
        json.loads(run("inspect", copy, "--verify", "--json")[1])["weights_verified"] is True
    )
    file = copy / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    assert run("inspect", copy)[0] == 0
    code, out, err = run("inspect", copy, "--verify")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {file}: sha256 ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_what_is_no_bundle_is_one_line_and_2(tmp_path: Path, run: Run, name: str) -> None:
    (tmp_path / "file").write_text("x")
    code, out, err = run("inspect", tmp_path / name)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 20, "5.0 MiB"),
        (7 << 40, "7.0 TiB"),
    ],
)
def test_bytes_are_said_in_their_unit(count: int, words: str) -> None:
    assert byte_words(count) == words


def test_columns_line_up() -> None:
    lines = list(columns([("a", 10, "x"), ("long", 2, "")], ("name", "n", "rest")))
    assert lines == ["  name  n   rest", "  a     10  x", "  long  2"]
