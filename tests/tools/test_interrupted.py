"""Commands that cannot finish: what was made is said, and what cannot be written costs no work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import Bundles

from cachegraph.runtime.engine import Engine
from cachegraph.tools.errors import BAD_INPUT, INTERRUPTED

pytestmark = pytest.mark.r2
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def shipped(bundles: Bundles) -> Path:
    """The shipped model, which has a tokenizer and a draft block."""
    return bundles.bundle("tiny:deepseek_v4")


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C at the end of so many graph calls more."""
    decode = Engine.decode

    def arm(calls: int) -> None:
        left = iter(range(calls))

        def stopping(engine: Engine, *args: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return decode(engine, *args)

        monkeypatch.setattr(Engine, "decode", stopping)

    return arm


OPTIONS = ("--max-tokens", "9", "--threads", "1", "--device", "cpu")


def test_an_interrupted_answer_is_printed_as_far_as_it_came(
    shipped: Path, run: Run, stop_after: Callable[[int], None]
) -> None:
    asked = ("generate", shipped, "-p", "import os", *OPTIONS, "--json", "--logprobs", "1")
    whole = json.loads(run(*asked)[1])
    assert whole["interrupted"] is False
    stop_after(4)
    code, out, err = run(*asked)
    assert code == INTERRUPTED
    found = json.loads(out)
    assert found["interrupted"] is True
    (answer,), (wanted,) = found["answers"], whole["answers"]
    assert answer["tokens"] == wanted["tokens"][:4]
    assert len(answer["logprobs"]) == 4
    assert wanted["text"].startswith(answer["text"])
    assert answer["finish"] is None
    assert "(stopped)" in err
    assert "tokens/s" not in err


@pytest.mark.parametrize("more", [(), ("--logprobs", "1"), ("--draft", "2")], ids=str)
def test_an_interrupted_prompt_has_an_empty_answer(
    shipped: Path, run: Run, stop_after: Callable[[int], None], more: tuple[str, ...]
) -> None:
    stop_after(0)
    code, out, _ = run("generate", shipped, "-p", "x", "-p", "y", *OPTIONS, "--json", *more)
    assert code == INTERRUPTED
    empty = {"text": "", "tokens": [], "finish": None}
    assert json.loads(out) == {
        "answers": [{"prompt": "x", **empty}, {"prompt": "y", **empty}],
        "interrupted": True,
    }


def test_interrupted_texts_are_printed_too(
    shipped: Path, run: Run, stop_after: Callable[[int], None]
) -> None:
    asked = ("generate", shipped, "-p", "def f(", "-p", "x = ", *OPTIONS)
    whole = run(*asked)[1].split("--- prompt 1\n")
    stop_after(5)
    code, out, _ = run(*asked)
    assert code == INTERRUPTED
    parts = out.split("--- prompt 1\n")
    assert parts[0].startswith("--- prompt 0\ndef f(")
    assert whole[0].startswith(parts[0].removesuffix("\n"))
    stop_after(3)
    code, out, err = run("generate", shipped, "-p", "import os", *OPTIONS)
    assert code == INTERRUPTED
    assert out.startswith("import os")
    assert out.endswith("\n")
    assert "(stopped)" in err


def test_logits_that_cannot_be_written_are_not_computed(
    bundles: Bundles, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundles.bundle(bundles.checkpoint())
    np.save(tmp_path / "ids.npy", np.arange(5))
    files = ("--tokens", tmp_path / "ids.npy", "--out")

    def opened(*args: Any, **options: Any) -> Engine:
        raise RuntimeError("opened")

    monkeypatch.setattr(Engine, "load", opened)
    (tmp_path / "folder").mkdir()
    code, out, err = run("logits", bundle, *files, tmp_path / "folder")
    assert (code, out, err) == (BAD_INPUT, "", f"error: {tmp_path}/folder: Is a directory\n")
    (tmp_path / "old.npy").write_bytes(b"old")
    for name in ("old.npy", "new.npy"):
        assert "opened" in run("logits", bundle, *files, tmp_path / name)[2]
    assert (tmp_path / "old.npy").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "ids.npy", "old.npy"]
