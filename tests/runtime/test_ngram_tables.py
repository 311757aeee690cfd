"""N-gram tables of the host: the answers are those of tables of the graph; the file is checked."""

from __future__ import annotations

import json
import mmap
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from support.bundles import Bundles, open_engine
from support.qwen4_exp import CONFIGS, tiny_config

from cachegraph.graphgen.qwen4_exp import source as qwen_source
from cachegraph.graphgen.qwen4_exp.source import model_source, preset_source
from cachegraph.models.contract import DType, Role
from cachegraph.models.errors import ConfigError, ContractError
from cachegraph.models.export_options import (
    Dialect,
    ExportOptions,
    NgramPlace,
    WeightType,
)
from cachegraph.models.manifest import MANIFEST_NAME, NgramFile, read_manifest
from cachegraph.models.ngram_spec import IDS, ROWS
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.bundle import open_bundle, verify
from cachegraph.runtime.ngram_tables import NgramTables, _mapped
from cachegraph.runtime.saved import identity_of

pytestmark = pytest.mark.r2

LENGTH = 57
FILE = "ngram.safetensors"
MAPS, ROLLUP = Path("/proc/self/maps"), Path("/proc/self/smaps_rollup")
TABLE = re.compile(r"ngram\.|ple_embedding")
Logits = NDArray[np.float32]


def answers(bundle: Path) -> Logits:
    """Logits of two sequences of unequal lengths in padded steps, of text with ends inside."""
    with open_engine(bundle) as engine:
        rng = np.random.default_rng(4)
        tokens = rng.integers(engine.manifest.vocab_size, size=(2, LENGTH))
        tokens[:, [9, 30]] = engine.manifest.planners.ngrams[0].end
        parts = []
        for first, second in (((0, 19), (0, 7)), ((19, 20), (7, 8)), ((20, 57), (8, 57))):
            spans = ((0, *first), (1, *second))
            batch = Batch.of(
                np.concatenate([tokens[s, a:b] for s, a, b in spans]),
                np.concatenate([np.arange(a, b) for _, a, b in spans]),
                np.concatenate([np.full(b - a, s) for s, a, b in spans]).tolist(),
                logits=True,
            )
            parts.append(engine.decode(batch))
        return np.concatenate(parts)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("weights", [WeightType.F32, WeightType.F16, WeightType.BF16])
def test_a_host_looks_up_what_a_graph_gathers(
    bundles: Bundles, name: str, weights: WeightType
) -> None:
    """One module and two; rows in either half keep their bits."""
    checkpoint = bundles.qwen_checkpoint(name)
    ours, theirs = (
        answers(bundles.bundle(checkpoint, ngram=place, weights=weights))
        for place in (NgramPlace.HOST, NgramPlace.GRAPH)
    )
    np.testing.assert_array_equal(ours, theirs)
    assert np.abs(ours).max() > 1


@pytest.mark.parametrize("place", [NgramPlace.HOST, NgramPlace.GRAPH])
def test_quantised_bundles_store_tables_as_published(
    bundles: Bundles, place: NgramPlace
) -> None:
    """bfloat16, in the graph as on the host."""
    bundle = bundles.quant_qwen_bundle(Dialect.ORT, WeightType.INT8, ngram=place)
    assert np.isfinite(answers(bundle)).all()
    name = FILE if place is NgramPlace.HOST else "weights.safetensors"
    length = int.from_bytes((bundle / name).read_bytes()[:8], "little")
    header = json.loads((bundle / name).read_bytes()[8 : 8 + length])
    kinds = [entry["dtype"] for key, entry in header.items() if TABLE.search(key)]
    assert kinds == ["BF16"]
    tables = read_manifest(bundle).ngram_tables
    assert (tables is None) == (place is NgramPlace.GRAPH)
    assert tables is None or tables.dtype is DType.BFLOAT16


def test_the_file_holds_the_parts_of_the_checkpoint_in_order(bundles: Bundles) -> None:
    """And the graph's own weights hold no table; its input is the rows."""
    checkpoint = bundles.qwen_checkpoint("ngrams")
    bundle = bundles.bundle(checkpoint, ngram=NgramPlace.HOST)
    config, published = tiny_config("ngrams"), load_file(checkpoint / "model.safetensors")
    tables, manifest = load_file(bundle / FILE), read_manifest(bundle)
    entry = manifest.ngram_tables
    assert entry is not None
    assert list(entry.tensors) == ["ngram.0", "ngram.1"]
    for module, layer in enumerate(config.ple_layers):
        prefix = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_"
        parts = [published[f"{prefix}{n}.weight"] for n in range(config.ngram_shards)]
        np.testing.assert_array_equal(tables[f"ngram.{module}"], np.concatenate(parts))
        assert entry.rows[module] == config.ngram_rows(module)
    names = {row.name: row.role for row in manifest.tensors}
    assert IDS not in names
    assert names[ROWS] is Role.TABLE
    assert not any(
        "ple_embedding" in name for name in load_file(bundle / "weights.safetensors")
    )


def test_rows_are_those_of_each_head_and_module() -> None:
    """Numbers count within a module's own table; bits of bfloat16 become float32."""
    first, second = np.arange(20.0).reshape(10, 2), -np.arange(12.0).reshape(6, 2)
    tables = [table.astype(np.float32) for table in (first, second)]
    ids = np.array([[3, 9, 5], [0, 1, 0]])
    wanted = [[6, 7, 18, 19, -10, -11], [0, 1, 2, 3, 0, -1]]
    found = NgramTables(tables, [2, 1], DType.FLOAT32).rows(ids)
    np.testing.assert_array_equal(found, np.array(wanted, np.float32))
    bits = [(table.view(np.uint32) >> 16).astype(np.uint16) for table in tables]
    found = NgramTables(bits, [2, 1], DType.BFLOAT16).rows(ids)
    np.testing.assert_array_equal(found, np.array(wanted, np.float32))
    assert found.dtype == np.float32


@pytest.fixture
def bundle(bundles: Bundles, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    made = bundles.bundle(bundles.qwen_checkpoint("ngrams"), ngram=NgramPlace.HOST)
    shutil.copytree(made, tmp_path / "bundle")
    return tmp_path / "bundle"


def shortened(tables: dict[str, Any]) -> None:
    tables["rows"][1] = 3


def narrower(tables: dict[str, Any]) -> None:
    tables["width"] -= 1


def single(tables: dict[str, Any]) -> None:
    del tables["tensors"][1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shortened, "n-gram tables of .* rows, the hash names"),
        (narrower, "values of a token, ngram_rows takes"),
        (single, "1 n-gram tables for 2 modules"),
    ],
)
def test_a_manifest_whose_tables_do_not_fit_is_refused(
    bundle: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
    change(manifest["ngram_tables"])
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(ContractError, match=message):
        open_bundle(bundle)


def test_a_graph_that_takes_rows_needs_tables(bundle: Path) -> None:
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
    manifest["ngram_tables"] = None
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(ContractError, match="belong to a graph that takes their rows"):
        open_bundle(bundle)


def test_a_damaged_file_of_tables_is_found(bundle: Path) -> None:
    """Missing or cut off when a bundle is opened, changed when it is verified."""
    verify(bundle)
    data = bytearray((bundle / FILE).read_bytes())
    data[-1] ^= 1
    (bundle / FILE).write_bytes(data)
    with pytest.raises(ContractError, match=f"{FILE}: sha256"):
        verify(bundle)
    (bundle / FILE).write_bytes(data[:-1])
    with pytest.raises(ContractError, match=f"{FILE} has .* bytes"):
        open_bundle(bundle)
    (bundle / FILE).unlink()
    with pytest.raises(ContractError, match=f"{FILE} is missing"):
        open_bundle(bundle)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.INT64])
def test_tables_of_another_type_are_refused(bundle: Path, dtype: DType) -> None:
    """A narrower type would give wrong rows, a wider one would read past the end."""
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
    manifest["ngram_tables"]["dtype"] = dtype.value
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(ContractError, match=r"ngram.0 has type and shape \('F32'"):
        open_engine(bundle)


@pytest.mark.parametrize("file", [FILE, "weights.safetensors"])
@pytest.mark.parametrize("length", [2**40, 2**64 - 1])
def test_a_header_of_damaged_length_is_refused(bundle: Path, file: str, length: int) -> None:
    data = (bundle / file).read_bytes()
    (bundle / file).write_bytes(length.to_bytes(8, "little") + data[8:])
    with pytest.raises(ContractError, match=f"{file} is not the weights file"):
        open_bundle(bundle)


def test_closing_releases_the_file(bundle: Path) -> None:
    if not MAPS.exists():
        pytest.skip("no list of maps on this system")
    engine = open_engine(bundle)
    assert str(bundle / FILE) in MAPS.read_text()
    engine.close()
    assert str(bundle / FILE) not in MAPS.read_text()


def test_rows_of_a_large_file_take_little_memory(tmp_path: Path) -> None:
    """A page of the file for each row read, and none around it; 1.5 GB without a byte on disk."""
    if not ROLLUP.exists():
        pytest.skip("no count of resident pages on this system")
    rows, width = 4_700_000, 160
    header = json.dumps(
        {"t": {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, 2 * rows * width]}}
    ).encode()
    start = 8 + len(header)
    with (tmp_path / FILE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(start + 2 * rows * width)
        last = np.arange(width, dtype=np.float32).view(np.uint32) >> 16
        file.seek(start + 2 * width * (rows - 1))
        file.write(last.astype(np.uint16).tobytes())
    entry = NgramFile(
        file=FILE,
        num_bytes=start + 2 * rows * width,
        header_sha256="",
        sha256="",
        tensors=("t",),
        dtype=DType.BFLOAT16,
        rows=(rows,),
        width=width,
    )
    tables = NgramTables(_mapped(tmp_path / FILE, entry), [16], DType.BFLOAT16)
    ids = np.random.default_rng(0).integers(rows, size=(32, 16))
    ids[-1, -1] = rows - 1
    before = resident()
    found = tables.rows(ids)
    assert resident() - before < 2 * ids.size * mmap.PAGESIZE
    np.testing.assert_array_equal(found[-1, -width:], np.arange(width))
    assert not found[:-1].any()


def resident() -> int:
    """Bytes of this process in memory, pages of files too."""
    return int(ROLLUP.read_text().split("Rss:")[1].split()[0]) * 1024


def test_auto_leaves_large_tables_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release's are; a bundle without weights names no file."""
    tables = preset_source("qwen3.8-flash-next", ExportOptions()).tables
    assert [table.sizes for table in tables] == [(320_001_536, 160)]
    config = tiny_config("ngrams")

    def held(options: ExportOptions) -> int:
        return len(model_source(config, options, pytest.fail).tables)

    assert held(ExportOptions()) == 0
    size = 4 * config.ngram_rows(1) * config.ngram_head_dim
    monkeypatch.setattr(qwen_source, "_LARGEST_TABLE", size)
    assert held(ExportOptions()) == 0
    monkeypatch.setattr(qwen_source, "_LARGEST_TABLE", size - 1)
    assert held(ExportOptions()) == 2
    assert held(ExportOptions(ngram=NgramPlace.GRAPH)) == 0


def test_a_family_without_tables_refuses_the_option(bundles: Bundles) -> None:
    for place in (NgramPlace.HOST, NgramPlace.GRAPH):
        with pytest.raises(ConfigError, match="no n-gram tables; leave out --ngram"):
            bundles.bundle(bundles.checkpoint(), ngram=place)


def test_a_state_belongs_to_its_tables(bundles: Bundles) -> None:
    """Another table is another model, though the weights file is the same."""
    manifest = read_manifest(
        bundles.bundle(bundles.qwen_checkpoint("plain"), ngram=NgramPlace.HOST)
    )
    tables = manifest.ngram_tables
    assert tables is not None
    other = tables.model_copy(update={"sha256": "0" * 64})
    changed = manifest.model_copy(update={"ngram_tables": other})
    assert identity_of(changed) != identity_of(manifest)
