"""Cache types in graphs: rows written and read are those of numpy, and only rows are converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from support import graphs
from support.bundles import Bundles
from support.emitted import run_emitted

from cachegraph.graphgen.cache_ops import ONNX_TYPES, CacheOps, Stored
from cachegraph.graphgen.freeze import freeze
from cachegraph.models.buckets import Bucket
from cachegraph.models.cache_types import CacheType
from cachegraph.models.contract import CachePart, DType
from cachegraph.models.export_options import Dialect, RowRead, RowWrite, Select
from cachegraph.models.manifest import Manifest, read_manifest

Floats = NDArray[np.float32]
SIZES = {"head_dim": 96, "index_head_dim": 160}
WIDTH, ROWS = 96, 11
Q8 = CacheType.Q8_0
TYPES = [  # rows, index: each type on either side, and the mixed ones
    (CacheType.F16, CacheType.F16, Dialect.PORTABLE),
    (CacheType.BF16, CacheType.BF16, Dialect.PORTABLE),
    (Q8, Q8, Dialect.PORTABLE),
    (Q8, Q8, Dialect.ORT),
    (CacheType.F32, Q8, Dialect.PORTABLE),
    (Q8, CacheType.F16, Dialect.PORTABLE),
]
ROW_OPS = {"Gather", "GatherND", "GatherElements", "ScatterND", "ScatterElements"}


def built(bundles: Bundles, **choices: Any) -> tuple[onnx.ModelProto, Manifest, Path]:
    folder = bundles.bundle(bundles.checkpoint(**SIZES), **choices)
    manifest = read_manifest(folder)
    return graphs.load(folder / manifest.template), manifest, folder / manifest.template


@pytest.mark.r1
@pytest.mark.parametrize(("rows", "index", "dialect"), TYPES)
def test_graphs_of_every_type(
    bundles: Bundles, rows: CacheType, index: CacheType, dialect: Dialect
) -> None:
    """The checker passes, writes wait for old reads, and what is not f32 is touched by row only."""
    model, manifest, path = built(bundles, cache=rows, index_cache=index, dialect=dialect)
    onnx.checker.check_model(path, full_check=True)
    specs = manifest.contract.caches
    assert graphs.alias_hazards(model, {s.name: s.out_name for s in specs}) == []
    uses = graphs.consumers(model)
    for spec in specs:
        readers = uses[spec.name] + uses[spec.out_name]
        assert {node.op_type for node in readers} <= ROW_OPS, spec.name


@pytest.mark.r1
@pytest.mark.parametrize("closes", [False, True])
def test_a_static_graph_of_q8_0(bundles: Bundles, closes: bool) -> None:
    """Every value has numbers for its shape, of rank 4 or less; no size is computed."""
    model, manifest, _ = built(bundles, cache=Q8, index_cache=Q8)
    kinds = tuple(spec.kind for spec in manifest.planners.compressors) if closes else ()
    dims = manifest.dims(Bucket(streams=2, step=4, context=16, closes=kinds))
    frozen = freeze(model, dims)
    known = graphs.shapes([*frozen.graph.value_info, *frozen.graph.output])
    assert {name for node in frozen.graph.node for name in node.output if name} <= known.keys()
    assert all(isinstance(d, int) for shape in known.values() for d in shape)
    assert max(map(len, known.values())) <= 4
    assert not {op for _, op in graphs.ops(frozen)} & {"Shape", "Range", "ReduceProd"}


@pytest.mark.r1
def test_q8_0_is_plain_onnx(bundles: Bundles) -> None:
    """No DequantizeLinear, which a runtime would fuse or move; no more than three new operators."""
    plain, _, _ = built(bundles)
    model, _, _ = built(bundles, cache=Q8, index_cache=Q8)
    new = graphs.ops(model) - graphs.ops(plain)
    assert new == {("", "Abs"), ("", "ReduceMax"), ("", "Round")}


def quantised(rows: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """q8_0 of rows [n, width]: codes [n, width] and scales [n, width / 32]."""
    blocks = rows.reshape(len(rows), -1, 32)
    peak = np.abs(blocks).max(axis=2) / np.float32(127)
    scales = np.clip(peak, np.float32(2.0**-24), np.float32(65504)).astype(np.float16)
    codes = np.rint(blocks / scales.astype(np.float32)[:, :, None])
    return np.clip(codes, -127, 127).astype(np.int8).reshape(rows.shape), scales


def dequantised(codes: NDArray[np.int8], scales: NDArray[np.float16]) -> Floats:
    blocks = codes.astype(np.float32).reshape(len(codes), -1, 32)
    values: Floats = (blocks * scales.astype(np.float32)[:, :, None]).reshape(codes.shape)
    return values


def stored_values(rows: Floats, form: CacheType) -> Floats:
    """What f32 rows are after they were stored."""
    if form is CacheType.Q8_0:
        return dequantised(*quantised(rows))
    dtype = {CacheType.F16: np.float16, CacheType.BF16: ml_dtypes.bfloat16}
    return rows.astype(dtype.get(form, np.float32)).astype(np.float32)


def hard_rows(count: int, seed: int) -> Floats:
    """Rows of all sizes; zeros, a lonely peak, values far below a scale, ties at .5."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, WIDTH)) * 10.0 ** rng.integers(-4, 4, (count, 1))
    rows[0] = 0
    rows[1] = 1e-12
    rows[1, 40] = 5.0
    rows[2, :32] = 1e-9
    rows[3, :32] = np.arange(32) + 0.5
    rows[3, 0] = 127
    return rows.astype(np.float32)


@pytest.mark.r2
@pytest.mark.parametrize("form", CacheType)
@pytest.mark.parametrize("read", RowRead)
@pytest.mark.parametrize("write", RowWrite)
def test_rows_are_those_of_numpy(
    tmp_path: Path, form: CacheType, read: RowRead, write: RowWrite
) -> None:
    """Bit for bit: written rows, and rows that were there, read by a table of row numbers."""
    old, new = hard_rows(ROWS, 1), hard_rows(5, 2)
    written, table = np.array([7, 0, 10, 3, 4]), np.array([[0, 7, 1], [10, 9, 7]])
    ops = CacheOps(read=read, write=write)
    feeds: dict[str, NDArray[Any]] = {"values": old, "new": new, "at": written, "table": table}
    if form is CacheType.Q8_0:
        feeds["values"], feeds["scales"] = quantised(old)

    def emit(op, v):
        if form is CacheType.Q8_0:
            cache = Stored(dtype=DType.INT8, values=v["values"], scales=v["scales"])
        else:
            dtype = {CacheType.F16: DType.FLOAT16, CacheType.BF16: DType.BFLOAT16}.get(
                form, DType.FLOAT32
            )
            cache = Stored(dtype=dtype, values=op.Cast(v["values"], to=ONNX_TYPES[dtype]))
        after = ops.write_rows(op, cache, v["at"], v["new"], WIDTH)
        rows = ops.read_rows(op, after, v["table"], WIDTH, [2, 3, WIDTH])
        parts = [after.part(p) for p in CachePart if p is CachePart.VALUES or after.scales]
        return [rows, *(op.Cast(part, to=ir.DataType.FLOAT) for part in parts)]

    rows, *parts = run_emitted(tmp_path, emit, feeds, lambda name: np.zeros(0))
    wanted = stored_values(old, form)
    wanted[written] = stored_values(new, form)
    np.testing.assert_array_equal(rows, wanted[table])
    if form is CacheType.Q8_0:
        codes, scales = quantised(old)
        codes[written], scales[written] = quantised(new)
        np.testing.assert_array_equal(parts[0], codes)
        np.testing.assert_array_equal(parts[1], scales)
    else:
        np.testing.assert_array_equal(parts[0], wanted)


@pytest.mark.r2
def test_q8_0_is_off_by_half_a_step_at_most() -> None:
    """The reference above is itself a quantisation: half a step, and the scale's rounding."""
    rows = hard_rows(50, 3)
    step = np.abs(rows.reshape(50, -1, 32)).max(axis=2) / 127
    error = np.abs(stored_values(rows, CacheType.Q8_0) - rows).reshape(50, -1, 32).max(axis=2)
    assert (error <= step * (0.5 + 127 * 2.0**-11) + 127 * 2.0**-25).all()


@pytest.mark.r2
def test_no_rows_at_all(tmp_path: Path) -> None:
    """A step in which no block closes writes an empty list, which must pass the reshapes."""
    codes, scales = quantised(hard_rows(ROWS, 1))
    empty = {"new": np.zeros((0, WIDTH), np.float32), "at": np.zeros(0, np.int64)}

    def emit(op, v):
        cache = Stored(dtype=DType.INT8, values=v["values"], scales=v["scales"])
        after = CacheOps().write_rows(op, cache, v["at"], v["new"], WIDTH)
        return [op.Cast(after.part(part), to=ir.DataType.FLOAT) for part in CachePart]

    feeds = {"values": codes, "scales": scales, **empty}
    found = run_emitted(tmp_path, emit, feeds, lambda name: np.zeros(0))
    np.testing.assert_array_equal(found[0], codes)
    np.testing.assert_array_equal(found[1], scales)


@pytest.mark.r1
def test_the_mask_lowering_converts_rows_too(bundles: Bundles) -> None:
    model, manifest, path = built(bundles, cache=Q8, index_cache=Q8, select=Select.MASK)
    onnx.checker.check_model(path, full_check=True)
    caches = {s.name: s.out_name for s in manifest.contract.caches}
    assert graphs.alias_hazards(model, caches) == []
