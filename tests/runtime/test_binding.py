"""Buffers: what may be shared, and what crosses in a step, seen on a recording device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.bundles import Bundles
from support.engines import batch_of, feed, snapshot
from support.fakes import DeviceValue, FakeSession, fake_cuda

from cachegraph.models.contract import DType, Role
from cachegraph.models.errors import CapacityError, ContractError, UsageError
from cachegraph.models.manifest import read_manifest
from cachegraph.runtime.binding import CpuBinder, CudaBinder, allocate_caches
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.memory import initial_caches, memory_report
from cachegraph.runtime.opening import OpenGraph, OpenGraphs
from cachegraph.runtime.ort import load_onnxruntime

Array = np.ndarray


def read_only() -> Array:
    array = np.zeros((4, 6), np.float32)
    array.flags.writeable = False
    return array


def unaligned() -> Array:
    return np.zeros(4 * 6 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 6)


ODD_ARRAYS: dict[str, tuple[Callable[[], Array], str]] = {
    "transposed": (lambda: np.zeros((6, 4), np.float32).T, "C-contiguous"),
    "fortran": (lambda: np.zeros((4, 6), np.float32, order="F"), "C-contiguous"),
    "sliced": (lambda: np.zeros((8, 6), np.float32)[::2], "C-contiguous"),
    "columns": (lambda: np.zeros((4, 12), np.float32)[:, :6], "C-contiguous"),
    "reversed": (lambda: np.zeros((4, 6), np.float32)[::-1], "C-contiguous"),
    "repeated": (lambda: np.broadcast_to(np.zeros(6, np.float32), (4, 6)), "C-contiguous"),
    "read-only": (read_only, "writeable"),
    "unaligned": (unaligned, "aligned"),
    "byte-swapped": (lambda: np.zeros((4, 6), ">f4"), "native byte order"),
}


@pytest.mark.r2
@pytest.mark.parametrize("name", ODD_ARRAYS)
def test_only_a_plain_array_is_shared(name: str) -> None:
    """B05: the others would be copied without a word, or written although they are read-only."""
    make, fault = ODD_ARRAYS[name]
    with pytest.raises(UsageError, match=rf"a buffer of shape \(4, 6\).* is not .*{fault}"):
        CpuBinder(load_onnxruntime()).cache(make(), DType.FLOAT32)


@pytest.mark.r0
def test_a_device_takes_only_plain_arrays_too() -> None:
    log: list[tuple[str, Any]] = []
    with pytest.raises(UsageError, match="C-contiguous"):
        CudaBinder(fake_cuda(log)).cache(np.zeros((6, 4), np.float32).T, DType.FLOAT32)
    assert log == []


@pytest.mark.r2
def test_a_shared_buffer_is_the_array_itself() -> None:
    binder = CpuBinder(load_onnxruntime())
    array = np.zeros((4, 6), np.float32)
    for buffer in (
        binder.cache(array, DType.FLOAT32),
        binder.host((3, 2), np.dtype(np.int64)),
    ):
        buffer.array[...] = 7
        assert buffer.value.data_ptr() == buffer.array.ctypes.data
        assert (buffer.value.numpy() == 7).all()
        binder.push(buffer)
        assert binder.pull(buffer) is buffer.array
    assert (array == 7).all()


@pytest.mark.r2
def test_a_runtime_that_copies_is_found_out() -> None:
    def copying(array: Array) -> Any:
        return load_onnxruntime().OrtValue.ortvalue_from_numpy(array.copy())

    fake = SimpleNamespace(OrtValue=SimpleNamespace(ortvalue_from_numpy=copying))
    with pytest.raises(UsageError, match="copied a buffer instead of sharing it"):
        CpuBinder(fake).cache(np.zeros((4, 6), np.float32), DType.FLOAT32)


@pytest.mark.r1
@pytest.mark.parametrize(
    "wrong",
    [
        lambda cache: cache[:-1],
        lambda cache: cache.reshape(cache.shape[1], cache.shape[0]),
        lambda cache: cache.astype(np.float16),
        lambda cache: cache.reshape(-1),
    ],
)
def test_a_cache_of_another_shape_or_type_is_refused(
    bundles: Bundles, wrong: Callable[[Array], Array]
) -> None:
    """B03: checked against the contract by the host, before anything is bound."""
    contract = read_manifest(bundles.bundle(bundles.checkpoint())).contract
    initial = initial_caches(contract)
    initial["cache.1.lid"] = wrong(initial["cache.1.lid"])
    with pytest.raises(ContractError, match=r"cache\.1\.lid: got shape .* the contract wants"):
        allocate_caches(CpuBinder(load_onnxruntime()), contract, initial)


@pytest.mark.r1
def test_a_cache_without_memory_names_layer_kind_and_bytes(bundles: Bundles) -> None:
    contract = read_manifest(bundles.bundle(bundles.checkpoint())).contract
    spec = next(spec for spec in contract.caches if spec.name == "cache.2.hca")
    asked = []

    class Full:
        def cache(self, initial: Array, dtype: DType) -> Any:
            asked.append(initial)
            if initial.shape == spec.shape:
                raise MemoryError
            return None

    wanted = rf"no memory for the hca cache of layer 2: {spec.num_bytes} bytes"
    with pytest.raises(CapacityError, match=wanted):
        allocate_caches(Full(), contract, initial_caches(contract))  # type: ignore[arg-type]
    assert len(asked) == contract.caches.index(spec) + 1


@pytest.mark.r2
def test_the_memory_report_is_what_is_allocated(engine: Engine) -> None:
    by_kind: Counter[Any] = Counter()
    for spec in engine.manifest.contract.caches:
        by_kind[spec.kind] += engine._store.caches[spec.name].array.nbytes
    assert engine.memory.by_kind == by_kind
    assert engine.memory.total == sum(by_kind.values())
    assert engine.memory == memory_report(engine.manifest.contract)


class Device:
    """An engine on a recording device."""

    def __init__(self, bundles: Bundles) -> None:
        folder = bundles.bundle(bundles.checkpoint())
        self.log: list[tuple[str, Any]] = []
        self.session = FakeSession(provider="CUDAExecutionProvider", log=self.log)
        binder = CudaBinder(fake_cuda(self.log))
        manifest = read_manifest(folder)
        graph = OpenGraph(
            session=self.session, contract=manifest.contract, device="cuda", binder=binder
        )
        self.engine = Engine(folder, manifest, OpenGraphs(stages=(graph,)))
        self.caches: dict[str, DeviceValue] = {
            spec.name: self.engine._store.caches[spec.name].value
            for spec in manifest.contract.caches
        }

    def events(self) -> Iterator[list[tuple[str, Any]]]:
        """The log, cut behind each graph call's last event."""
        step: list[tuple[str, Any]] = []
        for event in self.log:
            if event[0] == "to device" and any(e[0] == "run" for e in step):
                yield step
                step = []
            step.append(event)
        yield step


@pytest.fixture
def device(bundles: Bundles) -> Device:
    return Device(bundles)


@pytest.mark.r1
def test_on_a_device_caches_are_filled_once_and_never_cross_again(device: Device) -> None:
    contract = device.engine.manifest.contract
    initial = initial_caches(contract)
    assert [event for event, _ in device.log] == ["to device"] * len(contract.caches)
    assert [value for _, value in device.log] == list(device.caches.values())
    for name, value in device.caches.items():
        assert value.memory.tobytes() == initial[name].tobytes()
    device.log.clear()
    for counts in ({0: 30}, {1: 1, 2: 1}, {0: 5, 3: 9}):
        feed(device.engine, counts)
    crossed = {id(value) for event, value in device.log if event != "run"}
    assert not crossed & {id(value) for value in device.caches.values()}


@pytest.mark.r1
def test_on_a_device_a_step_is_one_copy_for_each_plan_buffer_and_the_logits_back(
    device: Device,
) -> None:
    device.log.clear()
    for counts in ({0: 30}, {1: 1, 2: 1}, {0: 5, 3: 9}, {0: 1}):
        feed(device.engine, counts)
    contract = device.engine.manifest.contract
    steps = list(device.events())
    assert len(steps) == sum(event == "run" for event, _ in device.log) >= 5
    for step in steps:
        (run,) = [value for event, value in step if event == "run"]
        names = {id(value): name for name, value in (*run.inputs, *run.outputs)}
        pushed = [names[id(v)] for event, v in step[: len(step) - 2] if event == "to device"]
        sizes = {name: value.memory.size for name, value in run.inputs}
        assert sorted(pushed) == sorted(r.name for r in contract.host_rows if sizes[r.name])
        assert [event for event, _ in step[-2:]] == ["run", "to host"]
        assert names[id(step[-1][1])] == "logits"


@pytest.mark.r1
def test_on_a_device_each_cache_is_input_and_output_at_one_address(device: Device) -> None:
    for counts in ({0: 30}, {1: 1, 2: 1}, {0: 1}):
        feed(device.engine, counts)
    contract = device.engine.manifest.contract
    assert len(device.session.bindings) == len(device.engine._graph.calls) >= 3
    for binding in device.session.bindings:
        inputs, outputs = Counter(n for n, _ in binding.inputs), dict(binding.outputs)
        assert set(inputs.values()) == {1}
        assert inputs.keys() == {row.name for row in contract.inputs}
        assert outputs.keys() == {row.name for row in contract.outputs}
        for spec in contract.caches:
            address = device.caches[spec.name].data_ptr()
            assert dict(binding.inputs)[spec.name].data_ptr() == address
            assert outputs[spec.out_name].data_ptr() == address


@pytest.mark.r1
def test_on_a_device_only_rows_that_were_asked_for_come_back(device: Device) -> None:
    batch = batch_of(device.engine, {0: 5, 2: 5})
    some = batch.wants_logits.copy()
    some[[0, 1, 2, 3, 5, 6, 7, 8]] = False
    last_only = type(batch).of(batch.tokens, batch.positions, batch.seq_ids, logits=some)
    assert device.engine.decode(last_only).shape == (2, device.engine.manifest.vocab_size)
    assert [event for event, _ in device.log].count("run") == 2  # 4 tokens each, then 1
    (back,) = [value for event, value in device.log if event == "to host"]
    assert back.memory.shape == (2, device.engine.manifest.vocab_size)


def _has_cuda() -> bool:
    devices = load_onnxruntime().get_ep_devices()
    return any(device.ep_name == "CUDAExecutionProvider" for device in devices)


@pytest.fixture
def cuda(bundles: Bundles) -> Iterator[Engine]:
    if not _has_cuda():
        pytest.skip("no CUDA device")
    with Engine.load(bundles.bundle(bundles.checkpoint()), device="cuda") as engine:
        yield engine


@pytest.mark.r5
def test_cuda_gives_the_logits_of_the_cpu(cuda: Engine, engine: Engine) -> None:
    for counts in ({0: 30, 3: 2}, {1: 11}, {0: 1, 1: 1, 3: 1}, {2: 1}):
        mine, theirs = feed(cuda, counts), feed(engine, counts)
        for seq, rows in mine.items():
            assert np.abs(rows - theirs[seq]).max() <= 1e-4


@pytest.mark.r5
def test_cuda_writes_caches_in_place(cuda: Engine, engine: Engine) -> None:
    """The device buffers hold the rows of the CPU, at the addresses they had before."""
    addresses = {name: buffer.value.data_ptr() for name, buffer in cuda._store.caches.items()}
    for counts in ({0: 30, 3: 2}, {1: 11}, {2: 1}):
        feed(cuda, counts)
        feed(engine, counts)
    wanted = snapshot(engine)
    for spec in cuda.manifest.contract.caches:
        value = cuda._store.caches[spec.name].value
        assert value.data_ptr() == addresses[spec.name]
        for seq, count in {0: 30, 1: 11, 2: 1, 3: 2}.items():
            first = spec.layout.base(seq)
            last = first + min(count, spec.layout.rows_per_stream)
            rows = value.numpy()[first:last]
            assert np.abs(rows - wanted[spec.name][first:last]).max() <= 1e-4


@pytest.mark.r5
def test_auto_takes_cuda_where_it_is(cuda: Engine) -> None:
    with Engine.load(cuda.folder) as auto:
        assert auto.provider == "CUDAExecutionProvider"


@pytest.mark.r1
def test_every_tensor_of_the_contract_has_a_place(bundles: Bundles) -> None:
    """What the recording device is judged by: each row is a cache, host row or result."""
    contract = read_manifest(bundles.bundle(bundles.checkpoint())).contract
    roles = {row.role for row in contract.rows}
    assert roles == {Role.BATCH, Role.PLAN, Role.CACHE, Role.RESULT}
    assert [row.name for row in contract.rows if row.role is Role.RESULT] == [
        "logits",
        "embeddings",
    ]
