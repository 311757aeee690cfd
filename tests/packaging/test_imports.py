"""The arrows between the houses, and that the check sees an arrow that points the wrong way."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachegraph.tools.dev.imports import HOUSES, file_violations, violations

pytestmark = pytest.mark.r0
HOUSE = {house.name: house for house in HOUSES}


def test_every_import_follows_the_arrows(root: Path) -> None:
    assert violations(root) == []


@pytest.mark.parametrize(
    ("house", "line"),
    [
        ("models", "import onnx"),
        ("models", "from cachegraph.graphgen.layers import norm"),
        ("models", "import safetensors.numpy"),
        ("graphgen", "from cachegraph.runtime import Engine"),
        ("graphgen", "import onnxruntime as ort"),
        ("runtime", "from onnx.helper import make_model"),
        ("runtime", "import torch"),
        ("runtime", "from cachegraph import graphgen"),
        ("runtime", "def f():\n    import cachegraph.graphgen"),
        ("runtime", "if TYPE_CHECKING:\n    from transformers import AutoModel"),
        ("runtime", "importlib.import_module('cachegraph.tools.cli')"),
        ("tools", "from cachegraph.tools.dev.sizes import measure"),
        ("tools", "from models.errors import CachegraphError"),
        ("tools", "from .errors import describe"),
        ("graphgen", "from . import layers"),
    ],
)
def test_a_wrong_arrow_is_found(house: str, line: str) -> None:
    found = list(file_violations(HOUSE[house], f"{house}/x.py", line))
    assert len(found) == 1
    assert found[0].startswith(f"{house}/x.py:{1 + line.count(chr(10))}: imports ")


@pytest.mark.parametrize(
    ("house", "line"),
    [
        ("models", "from numpy.typing import NDArray"),
        ("graphgen", "from cachegraph.models import contract"),
        ("runtime", "import onnxruntime as ort, json"),
        ("tools", "from cachegraph import graphgen, runtime"),
        ("tools", "import transformers"),
    ],
)
def test_a_right_arrow_passes(house: str, line: str) -> None:
    assert list(file_violations(HOUSE[house], f"{house}/x.py", line)) == []


def test_a_file_on_disk_is_read(tmp_path: Path) -> None:
    (tmp_path / "runtime" / "deep").mkdir(parents=True)
    (tmp_path / "runtime" / "deep" / "x.py").write_text("import onnx\n", "utf-8")
    assert [line.partition(": ")[0] for line in violations(tmp_path)] == [
        "runtime/deep/x.py:1"
    ]


def test_development_scripts_may_import_each_other() -> None:
    line = "from cachegraph.tools.dev.sizes import measure"
    assert list(file_violations(HOUSE["tools"], "tools/dev/x.py", line)) == []
