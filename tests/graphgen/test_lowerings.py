"""Every lowering gives the same answer, and quantised matrices stay packed at run time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from support import graphs
from support.bundles import (
    BLOCKS,
    QWEN_BLOCKS,
    Bundles,
    Rows,
    largest_difference,
    live_rows,
    open_engine,
    with_capacity,
)
from support.qwen4_exp import CONFIGS as QWEN_CONFIGS

from cachegraph.models.export_options import (
    Dialect,
    Experts,
    RowRead,
    RowWrite,
    Select,
    WeightType,
)
from cachegraph.models.manifest import read_manifest
from cachegraph.runtime import ort
from cachegraph.runtime.batch import Batch

pytestmark = pytest.mark.r2

FAMILIES = ["deepseek_v4", "qwen4_exp"]
SAME = 1e-5
LENGTH = 71
LOWERINGS: Mapping[str, Mapping[str, Any]] = {
    "gather=elements": {"gather": RowRead.ELEMENTS},
    "gather=nd": {"gather": RowRead.ND},
    "scatter=elements": {"scatter": RowWrite.ELEMENTS},
    "select=mask": {"select": Select.MASK},
    "experts=all": {"experts": Experts.ALL},
    "elements, mask, all": {
        "gather": RowRead.ELEMENTS,
        "scatter": RowWrite.ELEMENTS,
        "select": Select.MASK,
        "experts": Experts.ALL,
    },
    "nd, mask, ort": {
        "gather": RowRead.ND,
        "select": Select.MASK,
        "dialect": Dialect.ORT,
    },
    "elements, all, ort": {
        "scatter": RowWrite.ELEMENTS,
        "experts": Experts.ALL,
        "dialect": Dialect.ORT,
    },
}


def answer(folder: Path) -> tuple[NDArray[np.float32], Rows]:
    """Logits of a text in three steps, and the rows that it leaves."""
    with open_engine(folder) as engine:
        tokens = np.random.default_rng(5).integers(engine.manifest.vocab_size, size=LENGTH)
        parts = [
            engine.decode(Batch.of(tokens[start:end], np.arange(start, end), logits=True))
            for start, end in ((0, 40), (40, 41), (41, LENGTH))
        ]
        return np.concatenate(parts), live_rows(engine, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_lowerings_agree(bundles: Bundles, family: str, lowering: str) -> None:
    """Logits and every live cache row, to 1e-5."""
    hybrid = family == "qwen4_exp"
    checkpoint = bundles.qwen_checkpoint("six") if hybrid else bundles.checkpoint()
    plain = bundles.bundle(checkpoint)
    logits, rows = bundles.once((family, "answer"), lambda: answer(plain))
    other = bundles.bundle(checkpoint, **LOWERINGS[lowering])
    ours, our_rows = answer(other)
    np.testing.assert_allclose(ours, logits, rtol=0, atol=SAME)
    assert largest_difference(our_rows, rows) <= SAME
    assert np.abs(logits).max() > 1


def optimised(folder: Path, out: Path) -> onnx.ModelProto:
    """The graph that the engine's own session options leave to run."""
    manifest = read_manifest(folder)
    settings = ort._settings(onnxruntime, manifest, ort.SessionOptions(threads=1))
    settings.optimized_model_filepath = str(out / "optimised.onnx")
    settings.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", "optimised.bin"
    )
    settings.add_session_config_entry(
        "session.optimized_model_external_initializers_min_size_in_bytes", "16"
    )
    onnxruntime.InferenceSession(
        str(folder / manifest.template), settings, providers=["CPUExecutionProvider"]
    )
    return graphs.load(out / "optimised.onnx")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", [WeightType.INT8, WeightType.INT4])
def test_portable_matrices_run_as_packed_products(
    bundles: Bundles, family: str, weights: WeightType, tmp_path: Path
) -> None:
    """No DequantizeLinear is left in front of a MatMul: each pair became one MatMulNBits."""
    make = bundles.quant_qwen_bundle if family == "qwen4_exp" else bundles.quant_bundle
    folder = make(Dialect.PORTABLE, weights)
    template = graphs.load(folder / read_manifest(folder).template)
    pairs = len(graphs.nodes(template, "DequantizeLinear"))
    model = optimised(folder, tmp_path)
    assert graphs.nodes(model, "DequantizeLinear") == []
    packed = graphs.nodes(model, "MatMulNBits")
    assert len(packed) == pairs > 30
    for node in packed:
        attributes = {a.name: a.i for a in node.attribute}
        assert attributes["accuracy_level"] == 4
        assert attributes["bits"] == weights.bits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", [WeightType.INT8, WeightType.INT4])
def test_both_dialects_store_the_same_matrices(
    bundles: Bundles, family: str, weights: WeightType
) -> None:
    """Their answers lie nearer to each other than to f32: they differ in rounded activations."""
    checkpoint, make = bundles.checkpoint(**BLOCKS), bundles.quant_bundle
    if family == "qwen4_exp":
        checkpoint, make = bundles.qwen_checkpoint(**QWEN_BLOCKS), bundles.quant_qwen_bundle
    plain, _ = answer(bundles.bundle(checkpoint))
    portable, fused = (answer(make(d, weights))[0] for d in Dialect)
    assert np.median(np.abs(portable - fused)) < np.median(np.abs(portable - plain))
    assert np.median(np.abs(portable - fused)) < 0.03


def test_the_fused_rule_agrees(bundles: Bundles) -> None:
    """Without snapshots: logits and every live cache row, to 1e-5."""
    capacity = with_capacity(rewind=0)
    for name in QWEN_CONFIGS:
        checkpoint = bundles.qwen_checkpoint(name)
        (plain, plain_rows), (fused, rows) = (
            answer(bundles.bundle(checkpoint, dialect=dialect, capacity=capacity))
            for dialect in Dialect
        )
        np.testing.assert_allclose(fused, plain, rtol=0, atol=SAME)
        assert largest_difference(rows, plain_rows) <= SAME
