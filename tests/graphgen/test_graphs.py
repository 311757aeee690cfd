"""Every tiny config builds in both dialects, and its graphs keep the rules of the profile.

Of every family: what differs between families stands in tables at the top.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import graphs
from support.bundles import BLOCKS, QWEN_BLOCKS, Bundles, with_capacity
from support.qwen4_exp import CONFIGS as QWEN_CONFIGS
from support.tiny import CONFIGS

from cachegraph.graphgen.freeze import freeze
from cachegraph.models.buckets import Bucket
from cachegraph.models.contract import CacheKind, Contract
from cachegraph.models.deepseek_v4 import contract as deepseek_contract
from cachegraph.models.deepseek_v4 import serial as deepseek_serial
from cachegraph.models.export_options import (
    Dialect,
    Experts,
    RowRead,
    RowWrite,
    Select,
    WeightType,
)
from cachegraph.models.manifest import Manifest, read_manifest
from cachegraph.models.qwen4_exp import contract as qwen_contract
from cachegraph.models.qwen4_exp import serial as qwen_serial

pytestmark = pytest.mark.r1

# Every operator of ai.onnx that a graph may hold; a new one is a decision, not an accident.
PORTABLE = """
    Add And Cast Clip Concat Cos Div Expand Gather GatherElements Greater Less LessOrEqual
    LpNormalization MatMul Mul Neg Pow Range ReduceMean ReduceProd ReduceSum Relu Reshape
    ScatterElements ScatterND Shape Sigmoid Sin Softmax Softplus Split Sqrt Squeeze Sub TopK
    Transpose Unsqueeze Where
"""
# Those that only one family needs: roots and signs of n-gram gates, decays of recurrent states.
OF_FAMILY = {
    "deepseek_v4": "",
    "qwen4_exp": "Abs CumSum Equal Exp GreaterOrEqual Max Mod Sign Slice",
}
MODELS = [
    *(("deepseek_v4", name) for name in CONFIGS),
    *(("qwen4_exp", name) for name in QWEN_CONFIGS),
]
SIZE_OPS = {"Shape", "Range", "ReduceProd", "NonZero", "Constant"}
BY_WEIGHTS = {
    (Dialect.PORTABLE, WeightType.F32): set(),
    (Dialect.ORT, WeightType.F32): {("com.microsoft", "MoE"), ("", "Log")},
    (Dialect.PORTABLE, WeightType.INT8): {("", "DequantizeLinear")},
    (Dialect.PORTABLE, WeightType.INT4): {("", "DequantizeLinear"), ("", "Sum")},
    (Dialect.ORT, WeightType.INT8): {
        ("com.microsoft", "MatMulNBits"),
        ("com.microsoft", "QMoE"),
    },
    (Dialect.ORT, WeightType.INT4): {
        ("com.microsoft", "MatMulNBits"),
        ("com.microsoft", "QMoE"),
    },
}
FUSED_RULE = {("com.microsoft", "LinearAttention")}  # where no snapshots are kept
LOWERED = {
    "gather=elements": ({"gather": RowRead.ELEMENTS}, set()),
    "gather=nd": ({"gather": RowRead.ND}, {("", "GatherND")}),
    "scatter=elements": ({"scatter": RowWrite.ELEMENTS}, set()),
    "select=mask": ({"select": Select.MASK}, set()),
    "experts=all": ({"experts": Experts.ALL}, set()),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A bundle, its template, and static graphs of some buckets."""

    folder: Path
    manifest: Manifest
    template: onnx.ModelProto
    frozen: tuple[tuple[Bucket, onnx.ModelProto], ...] = ()

    @property
    def contract(self) -> Contract:
        """What models/ says of this model."""
        config, capacity = self.manifest.config, self.manifest.capacity
        if self.manifest.family == "qwen4_exp":
            return qwen_contract.contract(qwen_serial.from_dict(config), capacity)
        return deepseek_contract.contract(deepseek_serial.from_dict(config), capacity)

    @property
    def allowed(self) -> set[tuple[str, str]]:
        """Operators that graphs of this family, dialect and weight form may hold."""
        options = self.manifest.exporter.options
        dialect = Dialect(options["dialect"])
        family = self.manifest.family
        names = f"{PORTABLE} {OF_FAMILY[family]}".split()
        extra = BY_WEIGHTS[dialect, WeightType(options["weights"])]
        fused = FUSED_RULE if family == "qwen4_exp" and dialect is Dialect.ORT else set()
        return {("", name) for name in names} | extra | fused

    @property
    def models(self) -> tuple[onnx.ModelProto, ...]:
        """The template and the static graphs."""
        return (self.template, *(model for _, model in self.frozen))


def some_buckets(manifest: Manifest) -> Iterator[Bucket]:
    """Decode with nothing closing; all closing and all rows wanted; one kind closing."""
    kinds = tuple(spec.kind for spec in manifest.planners.compressors)
    small, large = manifest.ladder.contexts[0], manifest.ladder.contexts[-1]
    yield Bucket(streams=1, step=1, context=small)
    yield Bucket(streams=3, step=5, context=large, closes=kinds, all_rows=True)
    if len(kinds) == 2:
        yield Bucket(streams=1, step=24, context=large, closes=kinds[1:])


def open_built(folder: Path) -> Built:
    manifest = read_manifest(folder)
    return Built(
        folder=folder, manifest=manifest, template=graphs.load(folder / manifest.template)
    )


@pytest.fixture(
    scope="module",
    params=list(product(MODELS, Dialect)),
    ids=lambda pair: f"{pair[0][0]}-{pair[0][1]}-{pair[1].value}",
)
def built(request: pytest.FixtureRequest, bundles: Bundles) -> Built:
    (family, name), dialect = request.param
    make = bundles.qwen_checkpoint if family == "qwen4_exp" else bundles.checkpoint
    made = open_built(bundles.bundle(make(name), dialect=dialect))
    buckets = some_buckets(made.manifest)
    frozen = tuple((b, freeze(made.template, made.manifest.dims(b))) for b in buckets)
    return replace(made, frozen=frozen)


@pytest.fixture(
    params=list(product(OF_FAMILY, BY_WEIGHTS)),
    ids=lambda pair: f"{pair[0]}-{pair[1][0].value}-{pair[1][1].value}",
)
def weighted(request: pytest.FixtureRequest, bundles: Bundles) -> Built:
    family, form = request.param
    make = bundles.quant_qwen_bundle if family == "qwen4_exp" else bundles.quant_bundle
    return open_built(make(*form))


def test_the_checker_passes(built: Built, tmp_path: Path) -> None:
    """The template beside its weights, and a static graph without them in memory."""
    onnx.checker.check_model(built.folder / built.manifest.template, full_check=True)
    for bucket, model in built.frozen:
        path = built.folder / f"{bucket.name}.check.onnx"
        onnx.save(model, path)
        onnx.checker.check_model(path)
        path.unlink()


def test_versions_are_the_lowest_that_serve(built: Built) -> None:
    """Opset 21 and IR 10; com.microsoft is named only where it is used."""
    for model in built.models:
        uses = {domain: 1 for domain, _ in graphs.ops(model) if domain}
        assert model.ir_version == 10
        assert {o.domain: o.version for o in model.opset_import} == {"": 21, **uses}
    assert built.manifest.opset == 21


def test_graph_inputs_and_outputs_are_the_contract(built: Built) -> None:
    """Names, order, types and shapes; the manifest's rows are those of models/."""
    rows = built.manifest.contract
    assert rows == built.contract
    graph = built.template.graph
    for values, wanted in ((graph.input, rows.inputs), (graph.output, rows.outputs)):
        assert list(graphs.shapes(values).items()) == [(r.name, r.shape) for r in wanted]
        assert graphs.element_types(values) == {r.name: r.dtype.value for r in wanted}


def test_a_frozen_graph_has_numbers_for_shapes_everywhere(built: Built) -> None:
    """Inputs and outputs as the contract says for the bucket; every value between static."""
    rows = built.manifest.contract
    for bucket, model in built.frozen:
        dims = built.manifest.dims(bucket)
        for values, wanted in (
            (model.graph.input, rows.inputs),
            (model.graph.output, rows.outputs),
        ):
            want = {row.name: row.resolve(dims) for row in wanted}
            assert graphs.shapes(values) == want, bucket.name
        known = graphs.shapes([*model.graph.value_info, *model.graph.output])
        made = {name for node in model.graph.node for name in node.output if name}
        assert made <= known.keys(), bucket.name
        loose = {n: s for n, s in known.items() if not all(isinstance(d, int) for d in s)}
        assert not loose, bucket.name


def test_a_frozen_graph_computes_no_sizes(built: Built) -> None:
    for bucket, model in built.frozen:
        left = {op for _, op in graphs.ops(model)}
        assert not left & SIZE_OPS, bucket.name


def test_only_allowed_operators(built: Built) -> None:
    """No more than the list, no control flow; the portable dialect is ai.onnx alone."""
    dialect = Dialect(built.manifest.exporter.options["dialect"])
    for model in built.models:
        found = graphs.ops(model)
        assert found <= built.allowed
        assert not {op for _, op in found} & graphs.CONTROL_FLOW
        assert not [a for n in model.graph.node for a in n.attribute if a.HasField("g")]
        if dialect is Dialect.PORTABLE:
            assert {domain for domain, _ in found} == {""}


def test_only_allowed_operators_in_every_weight_form(weighted: Built) -> None:
    options = weighted.manifest.exporter.options
    extra = BY_WEIGHTS[Dialect(options["dialect"]), WeightType(options["weights"])]
    found = graphs.ops(weighted.template)
    assert found <= weighted.allowed
    assert extra <= found


def test_a_model_without_snapshots_has_the_fused_rule(bundles: Bundles) -> None:
    """In the ort dialect; it gives the last state alone."""
    checkpoint = bundles.qwen_checkpoint()
    for dialect, rewind in product(Dialect, (0, 1)):
        capacity = with_capacity(rewind=rewind)
        made = open_built(bundles.bundle(checkpoint, dialect=dialect, capacity=capacity))
        found = graphs.ops(made.template)
        assert found <= made.allowed
        assert (found >= FUSED_RULE) == (dialect is Dialect.ORT and not rewind)


@pytest.mark.parametrize("lowering", LOWERED)
def test_only_allowed_operators_in_every_lowering(bundles: Bundles, lowering: str) -> None:
    choices, extra = LOWERED[lowering]
    for checkpoint in (bundles.checkpoint(), bundles.qwen_checkpoint()):
        made = open_built(bundles.bundle(checkpoint, **choices))
        found = graphs.ops(made.template)
        assert found <= made.allowed | extra
        assert extra <= found


def test_every_step_graph_scatters_rows_and_gathers_elements(built: Built) -> None:
    """Each cache is written by a ScatterND; each CSA layer reads the plan's row table."""
    csa = [s for s in built.manifest.contract.caches if s.kind is CacheKind.CSA]
    for model in built.models:
        writes = {n.input[0] for n in graphs.nodes(model, "ScatterND")}
        assert {spec.name for spec in built.manifest.contract.caches} == writes
        tables = [
            n for n in graphs.nodes(model, "GatherElements") if n.input[0] == "plan.csa.rows"
        ]
        assert len(tables) == len(csa)


def test_no_scatter_has_a_reduction(built: Built, bundles: Bundles) -> None:
    """Not even the default written out: some parsers refuse it."""
    elements = bundles.bundle(bundles.checkpoint(), scatter=RowWrite.ELEMENTS)
    for model in (built.template, open_built(elements).template):
        for node in graphs.nodes(model, "ScatterND", "ScatterElements"):
            assert "reduction" not in {attribute.name for attribute in node.attribute}


def test_index_constants_are_never_negative(built: Built) -> None:
    for model in built.models:
        constants = graphs.small_constants(model)
        for node in graphs.nodes(model, *graphs.INDEX_OPERAND):
            index = constants.get(node.input[graphs.INDEX_OPERAND[node.op_type]])
            assert index is None or (np.asarray(index) >= 0).all(), node.name


def test_rank_is_4_or_less(built: Built) -> None:
    for _, model in built.frozen:
        known = graphs.shapes(model.graph.value_info)
        assert max(len(shape) for shape in known.values()) <= 4


def test_rank_is_4_or_less_where_selection_masks(bundles: Bundles) -> None:
    for checkpoint in (bundles.checkpoint(), bundles.qwen_checkpoint()):
        made = open_built(bundles.bundle(checkpoint, select=Select.MASK))
        for bucket in some_buckets(made.manifest):
            model = freeze(made.template, made.manifest.dims(bucket))
            known = graphs.shapes(model.graph.value_info)
            assert max(len(shape) for shape in known.values()) <= 4, bucket.name


def test_top_k_never_asks_for_more_columns_than_there_are(built: Built) -> None:
    for bucket, model in built.frozen:
        known = graphs.shapes([*model.graph.value_info, *model.graph.input])
        constants = graphs.small_constants(model)
        for node in graphs.nodes(model, "TopK"):
            count = int(constants[node.input[1]].reshape(-1)[0])
            assert count <= known[node.input[0]][-1], bucket.name


def test_freezing_leaves_the_template_as_it_was(bundles: Bundles) -> None:
    made = open_built(bundles.bundle(bundles.checkpoint()))
    before = made.template.SerializeToString(deterministic=True)
    freeze(made.template, made.manifest.dims(next(some_buckets(made.manifest))))
    assert made.template.SerializeToString(deterministic=True) == before


def test_a_portable_matrix_has_one_dequantize_linear_with_one_mat_mul(
    bundles: Bundles,
) -> None:
    """A second use of either would make the runtime unpack the matrix in every step."""
    for form, stored in ((WeightType.INT8, "INT8"), (WeightType.INT4, "INT4")):
        model = open_built(bundles.quant_bundle(Dialect.PORTABLE, form)).template
        uses = graphs.consumers(model)
        code = onnx.TensorProto.DataType.Value(stored)
        matrices = [
            t for t in model.graph.initializer if t.data_type == code and len(t.dims) == 2
        ]
        assert len(matrices) == len(graphs.nodes(model, "DequantizeLinear")) > 0
        for matrix in matrices:
            (unpack,) = uses[matrix.name]
            (product_,) = uses[unpack.output[0]]
            attributes = {a.name: a.i for a in unpack.attribute}
            assert (unpack.op_type, attributes) == (
                "DequantizeLinear",
                {"axis": 0, "block_size": 32},
            )
            assert len(unpack.input) == 2, "symmetric: no zero point"
            assert product_.op_type == "MatMul"
            assert product_.input[1] == unpack.output[0]


def test_every_stored_code_is_unpacked_one_way(bundles: Bundles) -> None:
    """int8 expert stacks are gathered and cast; int4 has no Gather, so there are none."""
    counts = {}
    for form, stored in ((WeightType.INT8, "INT8"), (WeightType.INT4, "INT4")):
        model = open_built(bundles.quant_bundle(Dialect.PORTABLE, form)).template
        uses = graphs.consumers(model)
        code = onnx.TensorProto.DataType.Value(stored)
        stacks = [
            t for t in model.graph.initializer if t.data_type == code and len(t.dims) != 2
        ]
        assert all([n.op_type for n in uses[t.name]] == ["Gather"] for t in stacks)
        counts[stored] = len(stacks)
    assert counts == {"INT8": 2 * 5, "INT4": 0}


def test_fused_kernels_get_their_accuracy_level_and_layout(bundles: Bundles) -> None:
    for form, level in ((WeightType.INT8, 0), (WeightType.INT4, 4)):
        model = open_built(bundles.quant_bundle(Dialect.ORT, form)).template
        for node in graphs.nodes(model, "MatMulNBits", "QMoE"):
            found = {a.name: a.i for a in node.attribute}
            assert found["accuracy_level"] == (4 if node.op_type == "MatMulNBits" else level)
            if node.op_type == "QMoE":
                assert found["weights_prepacked"] == 0
        assert len(graphs.nodes(model, "QMoE")) == 5


BUILD = """
import sys
from cachegraph.graphgen.export import export
from cachegraph.models.export_options import Dialect, ExportOptions, WeightType
from cachegraph.graphgen.static import StaticSize
from cachegraph.models.capacity import Capacity
capacity = Capacity(context=48, sequences=2, max_step=8)
for dialect, form in (("portable", "f32"), ("ort", "f32"), ("portable", "int4")):
    options = ExportOptions(dialect=Dialect(dialect), weights=WeightType(form), capacity=capacity)
    out = sys.argv[2] + "/" + dialect + form
    export(sys.argv[1], out, options, static=[StaticSize(2, 4, 16)])
"""


@pytest.mark.parametrize("family", OF_FAMILY)
def test_building_twice_gives_the_same_bytes(
    bundles: Bundles, family: str, tmp_path: Path
) -> None:
    """Every file of a bundle, in processes that order sets of names differently."""
    checkpoint = bundles.checkpoint(**BLOCKS)
    if family == "qwen4_exp":
        checkpoint = bundles.qwen_checkpoint(**QWEN_BLOCKS)
    files = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        subprocess.run(
            [sys.executable, "-W", "error", "-c", BUILD, str(checkpoint), str(out)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        )
        paths = sorted(path for path in out.rglob("*") if path.is_file())
        files.append({path.relative_to(out): path.read_bytes() for path in paths})
    assert len(files[0]) == 3 * 4
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if files[0][name] != files[1][name]] == []
