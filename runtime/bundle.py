"""Opening a bundle folder: manifest read, files present, weights the ones it was made with.

An open checks size and header hash of the weights; `verify` hashes them whole.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from cachegraph.models.errors import ConfigError, ContractError
from cachegraph.models.manifest import Manifest, WeightsFile, read_manifest


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
    _check_header(folder, manifest.weights)
    return folder, manifest


def verify(folder: Path) -> None:
    """Hash the whole weights file; ContractError where it differs from the manifest."""
    folder, manifest = open_bundle(folder)
    assert manifest.weights is not None
    with (folder / manifest.weights.file).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != manifest.weights.sha256:
        raise ContractError(
            f"{folder / manifest.weights.file}: sha256 {digest}, the manifest says "
            f"{manifest.weights.sha256}; the file is damaged or was changed: export again"
        )


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
        header = length + file.read(int.from_bytes(length, "little"))
    if hashlib.sha256(header).hexdigest() != weights.header_sha256:
        raise ContractError(
            f"{path} is not the weights file that this bundle was written with; export again"
        )
