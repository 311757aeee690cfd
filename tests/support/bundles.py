"""Tiny bundles, made once for all tests that ask for the same, and what an engine's caches hold.

Owns which capacity and sizes the graph tests use. Torch-free. A checkpoint is random_checkpoint's;
`live_rows` reads an engine's inside, which nothing but a test may do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from support.qwen4_exp import random_checkpoint as random_qwen_checkpoint
from support.tiny import random_checkpoint

from cachegraph.graphgen.export import export
from cachegraph.graphgen.static import StaticSize
from cachegraph.models.capacity import Capacity
from cachegraph.models.contract import CacheKind, CacheSpec
from cachegraph.models.deepseek_v4.twin import TwinRun
from cachegraph.models.export_options import Dialect, ExportOptions, WeightType
from cachegraph.models.manifest import Manifest
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.hybrid import HybridMemory

Rows = dict[str, NDArray[Any]]
Made = TypeVar("Made")

CAPACITY = Capacity(context=100, sequences=4, max_step=24)
# Sizes that quantise in blocks of 32: the other tiny models have none that are whole blocks.
BLOCKS = {
    "hidden_size": 96,
    "q_lora_rank": 160,
    "head_dim": 112,
    "o_lora_rank": 64,
    "expert_size": 128,
    "rope_head_dim": 10,
}
QWEN_BLOCKS = {
    "hidden_size": 96,
    "head_dim": 24,
    "linear_value_dim": 40,
    "expert_size": 64,
    "shared_expert_size": 160,
    "hc_lowrank": 32,
    "ple_embed_dim": 224,
    "norm_topk_prob": False,
}


class Bundles:
    """Checkpoints and bundles below one folder, each made at its first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[Hashable, Any] = {}

    def checkpoint(
        self,
        name: str = "mixed",
        *,
        seed: int = 1,
        rounded: WeightType | None = None,
        with_draft: bool = False,
        **sizes: int,
    ) -> Path:
        """A random checkpoint in float32; `rounded` to what f16 or bf16 weights can hold."""

        def make(folder: Path) -> None:
            random_checkpoint(folder, seed=seed, name=name, with_draft=with_draft, **sizes)
            if rounded is not None:
                _round(folder / "model.safetensors", rounded)

        key = ("checkpoint", name, seed, rounded, with_draft, *sorted(sizes.items()))
        return self._once(key, make)

    def qwen_checkpoint(self, name: str = "plain", *, seed: int = 1, **sizes: object) -> Path:
        """A random Qwen4-Exp checkpoint in float32."""

        def make(folder: Path) -> None:
            random_qwen_checkpoint(folder, seed=seed, name=name, **sizes)

        return self._once(("qwen", name, seed, *sorted(sizes.items())), make)

    def bundle(
        self,
        checkpoint: str | Path,
        options: ExportOptions | None = None,
        *,
        static: Sequence[StaticSize] = (),
        **choices: Any,
    ) -> Path:
        """A bundle with ExportOptions of these choices; capacity CAPACITY unless chosen."""
        options = options or ExportOptions(**{"capacity": CAPACITY, **choices})

        def make(folder: Path) -> None:
            export(checkpoint, folder, options, static=static)

        return self._once(("bundle", str(checkpoint), options, tuple(static)), make)

    def quant_bundle(
        self,
        dialect: Dialect,
        weights: WeightType,
        *,
        with_draft: bool = False,
        **choices: Any,
    ) -> Path:
        """A bundle of the mixed model with sizes of whole blocks."""
        checkpoint = self.checkpoint(with_draft=with_draft, **BLOCKS)
        return self.bundle(checkpoint, dialect=dialect, weights=weights, **choices)

    def quant_qwen_bundle(self, dialect: Dialect, weights: WeightType, **choices: Any) -> Path:
        """A bundle of a Qwen4-Exp model with sizes of whole blocks."""
        checkpoint = self.qwen_checkpoint(**QWEN_BLOCKS)
        return self.bundle(checkpoint, dialect=dialect, weights=weights, **choices)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, made at the first use of the key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _once(self, key: Hashable, make: Callable[[Path], None]) -> Path:
        def numbered() -> Path:
            folder = self._root / str(len(self._made))
            make(folder)
            return folder

        return self.once(key, numbered)


def _round(file: Path, form: WeightType) -> None:
    dtype = np.float16 if form is WeightType.F16 else ml_dtypes.bfloat16
    tensors = load_file(file)
    for name, values in tensors.items():
        if values.dtype.kind == "f":
            tensors[name] = values.astype(dtype).astype(np.float32)
    save_file(tensors, file, {"format": "pt"})


def open_engine(bundle: Path, optimization: str = "all") -> Engine:
    """An engine on one CPU thread."""
    return Engine.load(
        bundle, device="cpu", threads=1, spinning=False, optimization=optimization
    )


def live_rows(engine: Engine, seq: int) -> Rows:
    """Every row that a later step may read of a sequence, by cache name, ascending by position.

    The window's raw rows, all finished compressed rows, and the state ring; of a hybrid model
    attention rows, keys of pools, and states with their snapshots.
    """
    return {
        spec.name: engine._store.caches[spec.name]
        .array[_live_places(engine, spec, seq)]
        .copy()
        for spec in engine.manifest.contract.caches
    }


def _live_places(engine: Engine, spec: CacheSpec, seq: int) -> NDArray[np.int64]:
    length, table = engine.length(seq), engine._store.table
    if isinstance(table, HybridMemory):
        if spec.kind is CacheKind.POOLED:
            return table._layouts[seq].reps
        return table.stored(seq).rows[spec.kind]
    if spec.kind is CacheKind.RAW:
        cells = table.cells
        near = cells._positions > length - 1 - cells.raw.window
        held = cells._members[seq] & (near | (cells._positions < cells.raw.pinned))
        places = np.flatnonzero(held)
        return places[np.argsort(cells._positions[places])]
    rows = _live_positions(engine.manifest, spec.kind, length)
    return spec.layout.base(seq) + rows % spec.layout.rows_per_stream


def _live_positions(manifest: Manifest, kind: CacheKind, length: int) -> NDArray[np.int64]:
    for compressor in manifest.planners.compressors:
        for compressed, state in compressor.serves:
            if kind is compressed:
                return np.arange(length // compressor.ratio)
            if kind is state:
                return np.arange(max(0, length - compressor.ring_rows), length)
    raise AssertionError(f"no planner serves {kind}")


def twin_rows(manifest: Manifest, run: TwinRun) -> Rows:
    """What `live_rows` should be after the twin's whole text."""
    return {spec.name: _twin_rows(manifest, run, spec) for spec in manifest.contract.caches}


def _twin_rows(manifest: Manifest, run: TwinRun, spec: CacheSpec) -> NDArray[np.float64]:
    attention, length = run.layers[spec.layer].attention, len(run.logits)
    if spec.kind is CacheKind.RAW:
        positions = np.arange(length)
        seen = positions >= length - manifest.planners.raw.window
        return attention.raw[seen | (positions < manifest.planners.raw.pinned)]
    if spec.kind in attention.compressors:
        return attention.compressors[spec.kind].rows
    compressed = CacheKind(spec.kind.value.removesuffix("_state"))
    part = attention.compressors[compressed]
    rows = np.concatenate([part.state_kv, part.state_score], axis=1)
    return rows[_live_positions(manifest, spec.kind, length)]


def largest_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """The greatest absolute difference between arrays of the same names and shapes."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, values in ours.items():
        assert values.shape == theirs[name].shape, name
        worst = max(worst, float(np.abs(values - theirs[name]).max(initial=0.0)))
    return worst


def with_capacity(**sizes: int) -> Capacity:
    """CAPACITY with some sizes replaced."""
    return replace(CAPACITY, **sizes)
