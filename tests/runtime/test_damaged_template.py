"""A template that ONNX Runtime or the freezer cannot read is the bundle's fault, said in a line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.engines import Engines

from cachegraph.graphgen import StaticSize, freeze_bundle
from cachegraph.models.errors import ContractError
from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2


@pytest.mark.parametrize("content", [b"", b"\x01garbage", None])
def test_a_damaged_template_is_named(
    engines: Engines, tmp_path: Path, content: bytes | None
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(engines.get("window_only").folder, folder)
    path = folder / "template.onnx"
    path.write_bytes(path.read_bytes()[:1000] if content is None else content)
    with pytest.raises(ContractError, match=r"template\.onnx"):
        Engine.load(folder, device="cpu")
    with pytest.raises(ContractError, match=r"template\.onnx"):
        freeze_bundle(folder, [StaticSize(1, 1, 8)])
