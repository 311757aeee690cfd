"""The one door to onnxruntime: found, checked, and opened with the bundle's session options.

Neither onnxruntime wheel is a dependency of the package, since both own the same folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from cachegraph.models.contract import Contract, Dim, TensorRow
from cachegraph.models.errors import (
    ConfigError,
    ContractError,
    DependencyError,
    DeviceError,
)
from cachegraph.models.manifest import Manifest
from cachegraph.models.stages import check_device

DeviceName = str  # auto, cpu, cuda, or a GPU by number: cuda:1
Optimization = Literal["disable", "basic", "extended", "layout", "all"]
_WHEELS = ("onnxruntime", "onnxruntime-gpu")
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Size arithmetic of the template runs on the host by design; nothing else may.
_HOST_OPS = frozenset({"Shape", "Range", "ReduceProd", "Squeeze", "Concat"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """How a session is opened.

    threads: intra-op threads, 0 for ONNX Runtime's own choice. spinning: whether idle threads burn
    CPU to answer sooner. optimization: graph optimisation level.
    """

    threads: int = 0
    spinning: bool = True
    optimization: Optimization = "all"

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ConfigError(f"threads is {self.threads}; it must be 0 or more")
        if self.optimization not in get_args(Optimization):
            levels = ", ".join(get_args(Optimization))
            raise ConfigError(f"no optimization {self.optimization!r}; there are {levels}")


def load_onnxruntime() -> Any:
    """The onnxruntime module; DependencyError says in one line what to install."""
    found = [name for name in _WHEELS if _is_installed(name)]
    if len(found) == 2:
        raise DependencyError(
            "both onnxruntime and onnxruntime-gpu are installed and overwrite each other; "
            "`pip uninstall onnxruntime onnxruntime-gpu`, then install one of them"
        )
    try:
        import onnxruntime
    except ImportError as error:
        raise DependencyError(
            "running a bundle needs ONNX Runtime: `pip install cachegraph[cpu]`, or "
            f"`cachegraph[cuda]` on a machine with an NVIDIA GPU ({error})"
        ) from error
    return onnxruntime


def pick_device(ort: Any, wanted: DeviceName) -> str:
    """The device to run on: cpu, cuda or cuda:1. DeviceError where it is not there."""
    if wanted == "auto":
        return "cuda" if count_cuda(ort) else "cpu"
    try:
        check_device(wanted)
    except ConfigError as error:
        raise DeviceError(f"{error}, and auto") from error
    check_there(ort, wanted)
    return wanted


def check_there(ort: Any, device: str) -> None:
    """DeviceError unless ONNX Runtime sees the device."""
    count = count_cuda(ort)
    if device == "cpu" or device_id(device) < count:
        return
    if not count:
        raise DeviceError(
            f"device {device}: ONNX Runtime sees no NVIDIA GPU here; install cachegraph[cuda] "
            "and a driver, or use device cpu"
        )
    raise DeviceError(
        f"device {device}: ONNX Runtime sees {count} NVIDIA GPU(s) here, numbered from 0; use "
        "one of them or device cpu, or export with other --devices"
    )


def count_cuda(ort: Any) -> int:
    """NVIDIA GPUs that ONNX Runtime sees."""
    # The list of available providers names CUDA on machines without a GPU; the devices do not.
    return sum(d.ep_name == _PROVIDERS["cuda"] for d in ort.get_ep_devices())


def device_id(device: str) -> int:
    """The number of a device: 0 for cpu and cuda, 1 for cuda:1."""
    return int(device.partition(":")[2] or 0)


def open_session(
    ort: Any,
    path: Path,
    contract: Contract,
    manifest: Manifest,
    device: str,
    options: SessionOptions,
) -> Any:
    """Open a graph of a bundle on a device, and check where its nodes were placed.

    device: cpu, cuda, or a GPU by number such as cuda:1.
    """
    _check_version(ort, manifest)
    settings = _settings(ort, manifest, options)
    provider = _PROVIDERS[device.partition(":")[0]]
    number = device_id(device)
    wanted = (provider, {"device_id": str(number)}) if number else provider
    try:
        session = ort.InferenceSession(str(path), sess_options=settings, providers=[wanted])
    except Exception as error:  # ONNX Runtime raises its own classes, without a common base
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ContractError(
            f"ONNX Runtime cannot open {path}: {reason}; export the bundle again"
        ) from error
    if session.get_providers()[0] != provider:
        raise DeviceError(
            f"device {device}: the session runs on {session.get_providers()[0]}, not {provider}; "
            "check that the GPU libraries of ONNX Runtime are installed"
        )
    check_placement(session, provider)
    check_contract(session, contract)
    return session


def check_contract(session: Any, contract: Contract) -> None:
    """ContractError that names the first tensor in which the graph and the manifest differ."""
    sides = (
        (session.get_inputs(), contract.inputs),
        (session.get_outputs(), contract.outputs),
    )
    for found, rows in sides:
        graph = {arg.name: (arg.type, tuple(arg.shape)) for arg in found}
        wanted = {row.name: (_type_name(row), row.shape) for row in rows}
        for name in {**wanted, **graph}:
            if graph.get(name) != wanted.get(name):
                raise ContractError(
                    f"{name}: the graph has {_tensor_words(graph.get(name))}, the manifest says "
                    f"{_tensor_words(wanted.get(name))}; export the bundle again"
                )


def _type_name(row: TensorRow) -> str:
    """ONNX Runtime's name of an element type."""
    short = {"float32": "float"}
    return f"tensor({short.get(row.dtype.value, row.dtype.value)})"


def _tensor_words(tensor: tuple[str, tuple[Dim, ...]] | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor[0]} of {list(tensor[1])}"


def check_placement(session: Any, provider: str) -> None:
    """DeviceError that names the first node placed on another provider."""
    for part in session.get_provider_graph_assignment_info():
        if part.ep_name == provider:
            continue
        for node in part.get_nodes():
            if node.op_type not in _HOST_OPS:
                raise DeviceError(
                    f"node {node.name} ({node.op_type}) was placed on {part.ep_name} instead of "
                    f"{provider}; every step would cross between devices; use device cpu"
                )


def _settings(ort: Any, manifest: Manifest, options: SessionOptions) -> Any:
    levels = {
        "disable": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
        "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        "layout": ort.GraphOptimizationLevel.ORT_ENABLE_LAYOUT,
        "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    }
    settings = ort.SessionOptions()
    settings.graph_optimization_level = levels[options.optimization]
    settings.intra_op_num_threads = options.threads
    settings.log_severity_level = 3
    # One session runs every bucket: patterns of each shape would only be kept, never reused.
    settings.enable_mem_pattern = False
    entries = {
        "session.intra_op.allow_spinning": "1" if options.spinning else "0",
        "session.qdq_matmulnbits_accuracy_level": str(manifest.accuracy_level),
        "session.record_ep_graph_assignment_info": "1",
    }
    for key, value in entries.items():
        settings.add_session_config_entry(key, value)
    return settings


def _check_version(ort: Any, manifest: Manifest) -> None:
    have, need = _numbers(ort.__version__), _numbers(manifest.min_onnxruntime)
    if have < need:
        raise ContractError(
            f"this bundle needs ONNX Runtime {manifest.min_onnxruntime} or newer, installed is "
            f"{ort.__version__}; upgrade it"
        )


def _numbers(text: str) -> tuple[int, ...]:
    digits = (
        "".join(c for c in part if c.isdigit()) for part in text.split("+")[0].split(".")
    )
    return tuple(int(part or 0) for part in digits)[:3]


def _is_installed(wheel: str) -> bool:
    try:
        version(wheel)
    except PackageNotFoundError:
        return False
    return True
