"""Stand-ins for ONNX Runtime that record what they are asked: sessions, and a device's memory.

Own no numbers: a fake session computes nothing. They offer the calls that cachegraph
makes, no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

_addresses = count(0x1000, 0x1000)


class FakeBinding:
    """Remembers what was bound by name, in order."""

    def __init__(self) -> None:
        self.inputs: list[tuple[str, Any]] = []
        self.outputs: list[tuple[str, Any]] = []

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.inputs.append((name, value))

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.outputs.append((name, value))


@dataclass(kw_only=True)
class FakeSession:
    """Runs nothing. log: shared with a device, so that the order of events is seen."""

    provider: str = "CPUExecutionProvider"
    log: list[tuple[str, Any]] = field(default_factory=list)
    bindings: list[FakeBinding] = field(default_factory=list)

    def get_providers(self) -> list[str]:
        return [self.provider]

    def io_binding(self) -> FakeBinding:
        self.bindings.append(FakeBinding())
        return self.bindings[-1]

    def run_with_iobinding(self, binding: FakeBinding) -> None:
        self.log.append(("run", binding))


class DeviceValue:
    """An OrtValue on a device: every transfer is logged."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, log: list[tuple[str, Any]]) -> None:
        self.memory: NDArray[Any] = np.zeros(shape, dtype)
        self.address = next(_addresses)
        self._log = log

    def data_ptr(self) -> int:
        return self.address

    def update_inplace(self, array: NDArray[Any]) -> None:
        assert array.shape == self.memory.shape
        assert array.dtype == self.memory.dtype
        self.memory[...] = array
        self._log.append(("to device", self))

    def numpy(self) -> NDArray[Any]:
        self._log.append(("to host", self))
        return self.memory.copy()


def fake_cuda(log: list[tuple[str, Any]]) -> Any:
    """A module with the part of onnxruntime that a CUDA binder uses."""

    def make(shape: Any, dtype: Any, device: str, device_id: int) -> DeviceValue:
        assert (device, device_id) == ("cuda", 0)
        return DeviceValue(tuple(shape), dtype, log)

    return SimpleNamespace(OrtValue=SimpleNamespace(ortvalue_from_shape_and_type=make))
