"""The door to onnxruntime: which wheel, which device, which options, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
from support.bundles import Bundles

from cachegraph.models.contract import DType
from cachegraph.models.errors import (
    ConfigError,
    ContractError,
    DependencyError,
    DeviceError,
)
from cachegraph.models.manifest import Manifest, read_manifest
from cachegraph.runtime import ort as door
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.ort import SessionOptions

pytestmark = pytest.mark.r1


@pytest.fixture
def manifest(bundles: Bundles) -> Manifest:
    return read_manifest(bundles.bundle(bundles.checkpoint()))


def installed(*wheels: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in wheels:
            raise PackageNotFoundError(name)
        return "1.32.0"

    return version


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    return text


def test_without_a_wheel_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "version", installed())
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DependencyError) as caught:
        door.load_onnxruntime()
    assert "pip install cachegraph[cpu]" in one_line(caught.value)


def test_with_both_wheels_one_line_says_what_to_remove(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "version", installed("onnxruntime", "onnxruntime-gpu"))
    with pytest.raises(DependencyError) as caught:
        door.load_onnxruntime()
    assert "`pip uninstall onnxruntime onnxruntime-gpu`" in one_line(caught.value)


@pytest.mark.parametrize("wheel", ["onnxruntime", "onnxruntime-gpu"])
def test_with_one_wheel_it_is_taken(wheel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "version", installed(wheel))
    assert door.load_onnxruntime() is onnxruntime


def devices(*providers: str) -> Any:
    found = [SimpleNamespace(ep_name=name) for name in providers]
    return SimpleNamespace(
        get_ep_devices=lambda: found,
        # What the wheel was built with; on a machine without a GPU it names CUDA all the same.
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
    )


CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@pytest.mark.parametrize(
    ("found", "wanted", "taken"),
    [
        ((CPU,), "auto", "cpu"),
        ((CPU,), "cpu", "cpu"),
        ((CPU, CUDA), "auto", "cuda"),
        ((CPU, CUDA), "cuda", "cuda"),
        ((CPU, CUDA), "cpu", "cpu"),
        ((CPU, CUDA), "cuda:0", "cuda:0"),
        ((CPU, CUDA, CUDA), "cuda:1", "cuda:1"),
    ],
)
def test_the_device_is_asked_of_the_devices(
    found: tuple[str, ...], wanted: Any, taken: str
) -> None:
    assert door.pick_device(devices(*found), wanted) == taken


def test_cuda_without_a_gpu_is_an_error() -> None:
    with pytest.raises(DeviceError, match="device cuda: ONNX Runtime sees no NVIDIA GPU"):
        door.pick_device(devices(CPU), "cuda")
    with pytest.raises(DeviceError, match=r"device cuda:1: ONNX Runtime sees 1 NVIDIA GPU"):
        door.pick_device(devices(CPU, CUDA), "cuda:1")


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", ""])
def test_an_unknown_device_is_an_error(name: str) -> None:
    with pytest.raises(DeviceError, match=f"no device '{name}'; there are cpu, cuda, .* auto"):
        door.pick_device(devices(CPU, CUDA), name)


def placed(provider: str, *ops: tuple[str, str]) -> Any:
    nodes = [SimpleNamespace(name=name, op_type=op) for name, op in ops]
    return SimpleNamespace(ep_name=provider, get_nodes=lambda: nodes)


def test_a_node_on_another_provider_is_named() -> None:
    parts = [
        placed(CUDA, ("a", "MatMul")),
        placed(CPU, ("size", "Shape"), ("top", "TopK"), ("last", "Gather")),
    ]
    session = SimpleNamespace(get_provider_graph_assignment_info=lambda: parts)
    with pytest.raises(DeviceError, match=r"node top \(TopK\) was placed on CPUExecution"):
        door.check_placement(session, CUDA)


def test_size_arithmetic_may_run_on_the_host() -> None:
    parts = [placed(CUDA, ("a", "MatMul")), placed(CPU, ("s", "Shape"), ("c", "Concat"))]
    session = SimpleNamespace(get_provider_graph_assignment_info=lambda: parts)
    door.check_placement(session, CUDA)


class RecordingOptions:
    """Session options that remember every entry."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_session_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


def recording(version: str, provider: str, opened: list[Any], manifest: Manifest) -> Any:
    def session(path: str, sess_options: RecordingOptions, providers: list[str]) -> Any:
        opened.append((path, sess_options, providers))
        contract = manifest.contract
        short = {"float32": "tensor(float)", "int64": "tensor(int64)"}

        def arguments(rows: Any) -> list[Any]:
            return [
                SimpleNamespace(name=r.name, type=short[r.dtype.value], shape=list(r.shape))
                for r in rows
            ]

        return SimpleNamespace(
            get_providers=lambda: [provider],
            get_provider_graph_assignment_info=lambda: [placed(provider, ("a", "MatMul"))],
            get_inputs=lambda: arguments(contract.inputs),
            get_outputs=lambda: arguments(contract.outputs),
        )

    return SimpleNamespace(
        __version__=version,
        InferenceSession=session,
        SessionOptions=RecordingOptions,
        GraphOptimizationLevel=onnxruntime.GraphOptimizationLevel,
    )


def open_fake(
    manifest: Manifest,
    *,
    version: str = "1.99.0",
    provider: str = CPU,
    device: Any = "cpu",
    options: SessionOptions | None = None,
) -> RecordingOptions:
    opened: list[Any] = []
    ort = recording(version, provider, opened, manifest)
    door.open_session(
        ort, Path("b.onnx"), manifest.contract, manifest, device, options or SessionOptions()
    )
    ((path, settings, providers),) = opened
    assert path == "b.onnx"
    assert providers == [door._PROVIDERS[device]]
    assert isinstance(settings, RecordingOptions)
    return settings


@pytest.mark.parametrize("level", [0, 4])
def test_the_accuracy_level_is_the_manifests_and_never_a_default(
    manifest: Manifest, level: int
) -> None:
    settings = open_fake(manifest.model_copy(update={"accuracy_level": level}))
    assert settings.entries["session.qdq_matmulnbits_accuracy_level"] == str(level)


def test_threads_spinning_and_optimisation_are_passed_on(manifest: Manifest) -> None:
    options = SessionOptions(threads=3, spinning=False, optimization="basic")
    settings: Any = open_fake(manifest, options=options)
    assert settings.intra_op_num_threads == 3
    assert settings.entries["session.intra_op.allow_spinning"] == "0"
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert settings.graph_optimization_level == level
    assert settings.enable_mem_pattern is False
    spinning = open_fake(manifest)
    assert spinning.entries["session.intra_op.allow_spinning"] == "1"


@pytest.mark.parametrize(
    ("have", "need", "is_enough"),
    [
        ("1.30.2", "1.31.0", False),
        ("1.31.0", "1.31.0", True),
        ("1.31.0+cu12", "1.31.0", True),
        ("1.100.0", "1.31.0", True),
        ("2.0.0", "1.31.0", True),
        ("1.31.1.dev2", "1.31.2", False),
    ],
)
def test_a_bundle_that_needs_a_newer_onnxruntime_is_refused_by_name(
    manifest: Manifest, have: str, need: str, is_enough: bool
) -> None:
    needy = manifest.model_copy(update={"min_onnxruntime": need})
    if is_enough:
        open_fake(needy, version=have)
        return
    with pytest.raises(ContractError) as caught:
        open_fake(needy, version=have)
    message = one_line(caught.value)
    assert f"needs ONNX Runtime {need} or newer, installed is {have}" in message


def test_a_session_that_fell_back_is_refused(manifest: Manifest) -> None:
    with pytest.raises(DeviceError, match=f"the session runs on {CPU}, not {CUDA}"):
        open_fake(manifest, device="cuda", provider=CPU)


def _changed(manifest: Manifest, tensor: str, changes: dict[str, Any]) -> Manifest:
    rows = tuple(replace(r, **changes) if r.name == tensor else r for r in manifest.tensors)
    return manifest.model_copy(update={"tensors": rows})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("out_rows", {"name": "rows_out"}, "rows_out: the graph has no such tensor"),
        ("plan.raw.read_pos", {"shape": ("W", "S")}, r"plan\.raw\.read_pos: the graph has .*"),
        (
            "logits",
            {"shape": ("O", 7)},
            r"logits: the graph has tensor\(float\) of \['O', 131\]",
        ),
        ("cache.1.csa", {"dtype": DType.FLOAT16}, r"cache\.1\.csa: .* says tensor\(float16\)"),
    ],
)
def test_a_graph_that_is_not_the_manifests_is_refused(
    engine: Engine, name: str, changes: dict[str, Any], message: str
) -> None:
    wrong = _changed(engine.manifest, name, changes)
    with pytest.raises(ContractError, match=message):
        door.check_contract(engine._graph.session, wrong.contract)


@pytest.mark.parametrize(
    ("options", "fault"),
    [({"threads": -1}, "threads is -1"), ({"optimization": "max"}, "no optimization 'max'")],
)
def test_odd_session_options_are_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        SessionOptions(**options)
