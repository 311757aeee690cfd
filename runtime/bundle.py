"""Opening a bundle folder: manifest read, files present, weights the ones it was made with.

An open checks size and header hash of the weights; `verify` hashes them whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from cachegraph.models.errors import ConfigError, ContractError
from cachegraph.models.manifest import Manifest, WeightsFile, read_manifest

_LARGEST_HEADER = 10**8  # bytes, as safetensors allows; a damaged length may say anything


def open_bundle(folder: Path, *, draft: bool = False) -> tuple[Path, Manifest]:
    """The resolved folder and its manifest; ContractError where the bundle cannot run.

    draft: whether the draft graph is wanted too; ConfigError where the bundle has none.

    Links are resolved here, since ONNX Runtime looks for the weights beside the graph file.
    """
    folder = folder.resolve()
    manifest = read_manifest(folder)
    if draft and manifest.draft is None:
        raise ConfigError(
            f"{folder} has no draft graph; export a checkpoint that has an MTP block, without "
            "--no-draft"
        )
    entry = manifest.draft if draft else None
    files = [stage.template for stage in manifest.stages] or [manifest.template]
    for file in (*files, *([entry.template] if entry else [])):
        if not (folder / file).is_file():
            raise ContractError(f"{folder}: {file} is missing; export the bundle again")
    if manifest.weights is None:
        raise ContractError(
            f"{folder} was exported without weights and can only be inspected; export a "
            "checkpoint to run it"
        )
    for weights in _weights_files(manifest):
        _check_header(folder, weights)
    return folder, manifest


def verify(folder: Path) -> None:
    """Hash every weights file whole; ContractError where one differs from the manifest."""
    folder, manifest = open_bundle(folder)
    for weights in _weights_files(manifest):
        with (folder / weights.file).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != weights.sha256:
            raise ContractError(
                f"{folder / weights.file}: sha256 {digest}, the manifest says "
                f"{weights.sha256}; the file is damaged or was changed: export again"
            )


def _weights_files(manifest: Manifest) -> Iterator[WeightsFile]:
    """The graphs' weights, and the n-gram tables that the host holds."""
    return (file for file in (manifest.weights, manifest.ngram_tables) if file is not None)


def _check_header(folder: Path, weights: WeightsFile) -> None:
    path = folder / weights.file
    if not path.is_file():
        raise ContractError(f"{path} is missing; export the bundle again")
    size = path.stat().st_size
    if size != weights.num_bytes:
        raise ContractError(
            f"{path} has {size} bytes, the manifest says {weights.num_bytes}; the file is cut "
            "off or was changed: export again"
        )
    with path.open("rb") as file:
        length = file.read(8)
        header = length + file.read(min(int.from_bytes(length, "little"), _LARGEST_HEADER))
    if hashlib.sha256(header).hexdigest() != weights.header_sha256:
        raise ContractError(
            f"{path} is not the weights file that this bundle was written with; export again"
        )
