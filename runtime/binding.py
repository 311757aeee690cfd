"""Buffers of a step and how they are bound: caches once, in place; plan buffers once per bucket.

A `Binder` is a device: on CPU every OrtValue shares the memory of a numpy array; on CUDA caches
stay on the device, each plan buffer is refreshed by one copy, and only logits come back. Whoever
owns a buffer holds the array and the OrtValue together (`Buffer`), so that neither outlives the
other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cachegraph.models.contract import CacheSpec, Contract, DType, Role
from cachegraph.models.errors import CapacityError, ContractError, DeviceError, UsageError

Array = NDArray[Any]
# TensorProto.BFLOAT16. To numpy the bits are uint16, so the OrtValue is told what they mean.
ONNX_BFLOAT16 = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """Host memory and the OrtValue bound for it. On CPU they share memory."""

    array: Array
    value: Any


class Binder(Protocol):
    """A device that holds buffers."""

    def beside(self, buffer: Buffer) -> Binder:
        """The device that a cache buffer is on, for copies of it."""

    def cache(self, initial: Array, dtype: DType) -> Buffer:
        """A cache buffer on the device that holds `initial`, a plain array (`check_plain`)."""

    def host(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """A buffer that the host writes (plans) or reads (logits)."""

    def push(self, buffer: Buffer) -> None:
        """Make what the host wrote visible to the device."""

    def pull(self, buffer: Buffer) -> Array:
        """What the device wrote, as a host array that the next step may overwrite."""

    def read_rows(self, buffer: Buffer, rows: Array) -> Array:
        """A copy of rows of a cache."""

    def write_rows(self, buffer: Buffer, rows: Array, values: Array) -> None:
        """Overwrite rows of a cache."""

    def copy_rows(self, buffer: Buffer, source: Array, target: Array) -> None:
        """Copy rows of a cache to other rows of it."""

    def move_rows(self, source: Buffer, rows: Array, target: Buffer, places: Array) -> None:
        """Copy rows of one buffer over rows of another on the device."""

    def zero_rows(self, buffer: Buffer, start: int, end: int) -> None:
        """Zero rows [start, end) of a cache."""


class CpuBinder:
    """Buffers that numpy and ONNX Runtime share."""

    def __init__(self, ort: Any) -> None:
        self._ort = ort

    def beside(self, buffer: Buffer) -> Binder:
        """This device, which is the only one."""
        return self

    def cache(self, initial: Array, dtype: DType) -> Buffer:
        """The array itself, shared."""
        return self._share(initial, dtype is DType.BFLOAT16)

    def host(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """Zeroed shared memory."""
        return self._share(np.zeros(shape, dtype))

    def push(self, buffer: Buffer) -> None:
        """Nothing to do: the memory is shared."""

    def pull(self, buffer: Buffer) -> Array:
        """The shared array."""
        return buffer.array

    def read_rows(self, buffer: Buffer, rows: Array) -> Array:
        """A copy of the shared rows."""
        copy: Array = buffer.array[rows]
        return copy

    def write_rows(self, buffer: Buffer, rows: Array, values: Array) -> None:
        """Into the shared memory."""
        buffer.array[rows] = values

    def copy_rows(self, buffer: Buffer, source: Array, target: Array) -> None:
        """A copy inside the shared memory."""
        buffer.array[target] = buffer.array[source]

    def move_rows(self, source: Buffer, rows: Array, target: Buffer, places: Array) -> None:
        """A copy between shared buffers."""
        target.array[places] = source.array[rows]

    def zero_rows(self, buffer: Buffer, start: int, end: int) -> None:
        """Zeros in the shared memory."""
        buffer.array[start:end] = 0

    def _share(self, array: Array, is_bfloat16: bool = False) -> Buffer:
        check_plain(array)
        make = self._ort.OrtValue
        if is_bfloat16:
            value = make.ortvalue_from_numpy_with_onnx_type(array, ONNX_BFLOAT16)
        else:
            value = make.ortvalue_from_numpy(array)
        if array.size and value.data_ptr() != array.ctypes.data:
            raise UsageError("ONNX Runtime copied a buffer instead of sharing it")
        return Buffer(array=array, value=value)


class CudaBinder:
    """Buffers on one NVIDIA GPU, with host memory beside the small ones."""

    def __init__(self, ort: Any, device_id: int = 0) -> None:
        self._ort = ort
        self._device_id = device_id

    def beside(self, buffer: Buffer) -> Binder:
        """This device, which is the only one."""
        return self

    def cache(self, initial: Array, dtype: DType) -> Buffer:
        """A device buffer, filled once; the host array is not kept in step with it."""
        check_plain(initial)
        element = ONNX_BFLOAT16 if dtype is DType.BFLOAT16 else initial.dtype.type
        value = self._value(initial.shape, element)
        value.update_inplace(initial)
        return Buffer(array=initial[:0], value=value)

    def host(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """A device buffer and a host array of the same shape."""
        return Buffer(array=np.zeros(shape, dtype), value=self._value(shape, dtype.type))

    def push(self, buffer: Buffer) -> None:
        """One host-to-device copy."""
        if buffer.array.size:
            buffer.value.update_inplace(buffer.array)

    def pull(self, buffer: Buffer) -> Array:
        """One device-to-host copy."""
        array: Array = buffer.value.numpy()
        return array

    def read_rows(self, buffer: Buffer, rows: Array) -> Array:
        """DeviceError: ONNX Runtime's Python API moves whole tensors only."""
        raise DeviceError("reading rows on a GPU is not supported yet; use device cpu")

    def write_rows(self, buffer: Buffer, rows: Array, values: Array) -> None:
        """DeviceError: ONNX Runtime's Python API moves whole tensors only."""
        raise DeviceError("writing rows on a GPU is not supported yet; use device cpu")

    def copy_rows(self, buffer: Buffer, source: Array, target: Array) -> None:
        """DeviceError: ONNX Runtime's Python API moves whole tensors only."""
        raise DeviceError("copying rows on a GPU is not supported yet; use device cpu")

    def move_rows(self, source: Buffer, rows: Array, target: Buffer, places: Array) -> None:
        """DeviceError: ONNX Runtime's Python API moves whole tensors only."""
        raise DeviceError("a device-side copy of rows is not supported on a GPU yet; use ring")

    def zero_rows(self, buffer: Buffer, start: int, end: int) -> None:
        """DeviceError: ONNX Runtime's Python API moves whole tensors only."""
        raise DeviceError("zeroing rows on a GPU is not supported yet; use device cpu")

    def _value(self, shape: tuple[int, ...], element: Any) -> Any:
        return self._ort.OrtValue.ortvalue_from_shape_and_type(
            list(shape), element, "cuda", self._device_id
        )


class PlacedBinder:
    """The caches of stages on several devices: every call goes to the device of its buffer."""

    def __init__(self, homes: Mapping[int, Binder]) -> None:
        """homes: the device of each cache buffer, by its id."""
        self._homes = homes

    def beside(self, buffer: Buffer) -> Binder:
        """The buffer's own device."""
        return self._homes[id(buffer)]

    def cache(self, initial: Array, dtype: DType) -> Buffer:
        """DeviceError: a cache belongs to a stage, a copy to the device of its cache."""
        raise DeviceError("a cache buffer belongs to the device of a stage")

    def host(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """DeviceError: step buffers belong to a stage."""
        raise DeviceError("a step buffer belongs to the device of a stage")

    def push(self, buffer: Buffer) -> None:
        """As of the buffer's device."""
        self._homes[id(buffer)].push(buffer)

    def pull(self, buffer: Buffer) -> Array:
        """As of the buffer's device."""
        return self._homes[id(buffer)].pull(buffer)

    def read_rows(self, buffer: Buffer, rows: Array) -> Array:
        """As of the buffer's device."""
        return self._homes[id(buffer)].read_rows(buffer, rows)

    def write_rows(self, buffer: Buffer, rows: Array, values: Array) -> None:
        """As of the buffer's device."""
        self._homes[id(buffer)].write_rows(buffer, rows, values)

    def copy_rows(self, buffer: Buffer, source: Array, target: Array) -> None:
        """As of the buffer's device."""
        self._homes[id(buffer)].copy_rows(buffer, source, target)

    def move_rows(self, source: Buffer, rows: Array, target: Buffer, places: Array) -> None:
        """As of the source's device, which the target shares."""
        self._homes[id(source)].move_rows(source, rows, target, places)

    def zero_rows(self, buffer: Buffer, start: int, end: int) -> None:
        """As of the buffer's device."""
        self._homes[id(buffer)].zero_rows(buffer, start, end)


def check_plain(array: Array) -> None:
    """UsageError unless the array can be shared: C-contiguous, aligned, writeable, native order.

    ONNX Runtime copies other layouts without a word, and writes into read-only memory.
    """
    flags = array.flags
    facts = {
        "C-contiguous": flags.c_contiguous,
        "aligned": flags.aligned,
        "writeable": flags.writeable,
        "in native byte order": array.dtype.isnative,
    }
    faults = [fact for fact, holds in facts.items() if not holds]
    if faults:
        raise UsageError(
            f"a buffer of shape {array.shape} and {array.dtype} is not {' nor '.join(faults)}; "
            "bind a copy made by numpy.array(..., order='C')"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundCall:
    """One bucket, bound: host buffers by contract name and the result rows.

    stages: the calls of all stages of a split model, of which this is the last.
    """

    binding: Any
    inputs: Mapping[str, Buffer]
    results: Mapping[str, Buffer]
    dims: Mapping[str, int]
    stages: tuple[BoundCall, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, of every stage."""
        calls = self.stages or (self,)
        buffers = (b for c in calls for b in (*c.inputs.values(), *c.results.values()))
        return sum(buffer.array.nbytes for buffer in buffers)

    @property
    def arrays(self) -> dict[str, Array]:
        """Host arrays of the inputs by contract name."""
        return {name: buffer.array for name, buffer in self.inputs.items()}


def allocate_caches(
    binder: Binder, contract: Contract, initial: Mapping[str, Array]
) -> dict[str, Buffer]:
    """All caches by contract name; CapacityError names the one that could not be had.

    ContractError where an array is not of the shape and type that the contract gives the cache.
    """
    buffers: dict[str, Buffer] = {}
    for spec in contract.caches:
        array = initial[spec.name]
        if array.shape != spec.shape or array.dtype != spec.dtype.numpy:
            raise ContractError(
                f"{spec.name}: got shape {array.shape} of {array.dtype}, the contract wants "
                f"{spec.shape} of {spec.dtype.value}"
            )
        try:
            buffers[spec.name] = binder.cache(array, spec.dtype)
        except MemoryError as error:
            raise no_memory(spec) from error
    return buffers


def no_memory(spec: CacheSpec) -> CapacityError:
    """The error of a cache that does not fit."""
    return CapacityError(
        f"no memory for the {spec.kind.value} cache of layer {spec.layer}: {spec.num_bytes} "
        "bytes; nothing was kept; export with less context or fewer sequences"
    )


def bind_call(
    session: Any,
    binder: Binder,
    contract: Contract,
    caches: Mapping[str, Buffer],
    dims: Mapping[str, int],
    asked: Collection[str],
    given: Mapping[str, Buffer] | None = None,
) -> BoundCall:
    """Bind a contract for one bucket: each cache as input and output of one buffer.

    asked: results that are wanted; the others are not brought out of the graph. given: buffers of
    another call that are inputs of this one.
    """
    binding = session.io_binding()
    inputs: dict[str, Buffer] = {}
    results: dict[str, Buffer] = {}
    for spec in contract.caches:
        binding.bind_ortvalue_input(spec.name, caches[spec.name].value)
        binding.bind_ortvalue_output(spec.out_name, caches[spec.name].value)
    for row in contract.rows:
        if row.role is Role.CACHE or (row.role is Role.RESULT and row.name not in asked):
            continue
        if given and row.name in given:
            binding.bind_ortvalue_input(row.name, given[row.name].value)
            continue
        buffer = binder.host(row.resolve(dims), row.dtype.numpy)
        if row.is_output:
            results[row.name] = buffer
            binding.bind_ortvalue_output(row.name, buffer.value)
        else:
            inputs[row.name] = buffer
            binding.bind_ortvalue_input(row.name, buffer.value)
    return BoundCall(binding=binding, inputs=inputs, results=results, dims=dims)
