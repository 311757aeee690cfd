"""Opening a bundle's graphs: which device each runs on, their sessions, and a binder a device.

Everything that can be refused is refused here, before a cache is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachegraph.models.contract import Contract
from cachegraph.models.manifest import Manifest
from cachegraph.runtime.binding import Binder, CpuBinder, CudaBinder
from cachegraph.runtime.ort import (
    DeviceName,
    SessionOptions,
    check_there,
    device_id,
    open_session,
    pick_device,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenGraph:
    """A session, the contract it was opened with, its device and the binder of that."""

    session: Any
    contract: Contract
    device: str
    binder: Binder


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenGraphs:
    """The graphs of a bundle: one, or its stages in order; the draft graph where it is wanted."""

    stages: tuple[OpenGraph, ...]
    draft: OpenGraph | None = None

    @property
    def devices(self) -> dict[int, str]:
        """The device of every layer's caches, the draft graph's too."""
        graphs = (*self.stages, self.draft) if self.draft else self.stages
        return {spec.layer: graph.device for graph in graphs for spec in graph.contract.caches}


def open_graphs(
    ort: Any,
    folder: Path,
    manifest: Manifest,
    wanted: DeviceName,
    options: SessionOptions,
    *,
    draft: bool,
) -> OpenGraphs:
    """Open every graph on its device. ContractError or DeviceError names what stands against it.

    The draft graph runs where the last stage does.
    """
    devices = stage_devices(ort, manifest, wanted)
    binders = _binders(ort, devices)
    files = [(s.template, manifest.stage_contract(s)) for s in manifest.stages] or [
        (manifest.template, manifest.contract)
    ]

    def opened(file: str, contract: Contract, device: str) -> OpenGraph:
        session = open_session(ort, folder / file, contract, manifest, device, options)
        return OpenGraph(
            session=session, contract=contract, device=device, binder=binders[device]
        )

    stages = tuple(
        opened(file, contract, device)
        for (file, contract), device in zip(files, devices, strict=True)
    )
    entry = manifest.draft if draft else None
    return OpenGraphs(
        stages=stages,
        draft=opened(entry.template, entry.contract, devices[-1]) if entry else None,
    )


def stage_devices(ort: Any, manifest: Manifest, wanted: DeviceName) -> tuple[str, ...]:
    """The device of each graph: the manifest's where CUDA is taken, else the one asked for.

    cpu and a GPU by number mean all graphs. DeviceError where a device is not there.
    """
    device = pick_device(ort, wanted)
    if device != "cuda" or not manifest.stages:
        return (device,) * max(1, len(manifest.stages))
    # Two names of one GPU would be two devices, and the streams would cross for nothing.
    names = (stage.device or device for stage in manifest.stages)
    devices = tuple("cuda:0" if name == "cuda" else name for name in names)
    for name in devices:
        check_there(ort, name)
    return devices


def _binders(ort: Any, devices: Iterable[str]) -> dict[str, Binder]:
    return {
        device: CpuBinder(ort) if device == "cpu" else CudaBinder(ort, device_id(device))
        for device in devices
    }
