"""Commands that succeed: what they write, and what stands on stdout and stderr."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import Bundles, open_engine
from support.engines import text

from cachegraph.models.contract import CacheKind, RowSharing
from cachegraph.models.manifest import read_manifest
from cachegraph.runtime.batch import Batch
from cachegraph.runtime.continuation import GenerateOptions
from cachegraph.runtime.engine import Engine
from cachegraph.tools.commands.logits import parse_chunks

pytestmark = pytest.mark.r2
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def shipped(bundles: Bundles) -> Path:
    """The shipped model, which has a tokenizer."""
    return bundles.bundle("tiny:deepseek_v4")


@pytest.mark.parametrize("chunks", [None, "7,1,16", "1", "40", "100", "3,2"])
def test_logits_are_those_of_the_engine_in_any_split(
    bundles: Bundles, tmp_path: Path, run: Run, chunks: str | None
) -> None:
    bundle = bundles.bundle(bundles.checkpoint())
    ids = text(0, 0, 40, 131)
    np.save(tmp_path / "ids.npy", np.array(ids, np.int32))
    out = tmp_path / "rows.npy"
    split = [] if chunks is None else ["--chunks", chunks]
    files = ("--tokens", tmp_path / "ids.npy", "--out", out)
    code, shown, err = run(
        "logits", bundle, *files, *split, "--threads", "1", "--device", "cpu"
    )
    assert (code, shown) == (0, "")
    assert err.startswith(f"wrote {out}: 40 rows, in ")
    rows = np.load(out)
    with open_engine(bundle) as engine:
        wanted = engine.decode(Batch.of(ids, logits=[True] * 40))
    assert rows.dtype == np.float32
    assert np.abs(rows - wanted).max() <= 1e-5


@pytest.mark.parametrize(
    ("chunks", "count", "sizes"),
    [
        (None, 9, [9]),
        ("4", 9, [4, 4, 1]),
        ("7,1", 10, [7, 1, 1, 1]),
        ("2,3,64", 9, [2, 3, 4]),
        ("9", 9, [9]),
        ("9,5", 4, [4]),
    ],
)
def test_the_last_chunk_size_repeats(chunks: str | None, count: int, sizes: list[int]) -> None:
    assert parse_chunks(chunks, count) == sizes


def test_generate_streams_the_prompt_and_what_follows(shipped: Path, run: Run) -> None:
    options = ("--max-tokens", "12", "--threads", "1", "--device", "cpu")
    code, out, err = run("generate", shipped, "--prompt", "import os", *options)
    assert code == 0
    assert out.startswith("import os")
    assert err.startswith("running on CPUExecutionProvider\n")
    assert "tokens/s" in err
    code, told, _ = run("generate", shipped, "--prompt", "import os", *options, "--json")
    assert code == 0
    (answer,) = json.loads(told)["answers"]
    assert out == f"import os{answer['text']}\n"
    assert answer["finish"] == "length"
    assert len(answer["tokens"]) == 12


def test_generate_takes_several_prompts_and_files(
    shipped: Path, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "prompt.txt").write_text("class A:")
    options = ("--max-tokens", "5", "--logprobs", "2", "--json", "--threads", "1")
    places = ("-p", "def f(", "--prompt-file", tmp_path / "prompt.txt", "-p", "x = ")
    code, out, _ = run("generate", shipped, *places, *options)
    assert code == 0
    answers = json.loads(out)["answers"]
    assert [answer["prompt"] for answer in answers] == ["def f(", "x = ", "class A:"]
    for answer in answers:
        assert len(answer["logprobs"]) == len(answer["tokens"]) == 5
        assert [len(top) for top in answer["top_logprobs"]] == [2] * 5
        alone = run("generate", shipped, "-p", answer["prompt"], *options)[1]
        assert json.loads(alone)["answers"][0]["tokens"] == answer["tokens"]


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A drafter that never knows better than token 0; says whether loads asked for it."""
    asked: list[bool] = []
    load = Engine.load.__func__  # type: ignore[attr-defined]

    def loaded(cls: type[Engine], bundle: Path, *, draft: bool, **options: Any) -> Engine:
        asked.append(draft)
        engine: Engine = load(cls, bundle, **options)
        return engine

    def draft(engine: Engine, pending: Any, count: Any, choose: Any) -> dict[int, list[int]]:
        row = np.zeros(engine.manifest.vocab_size, np.float32)
        return {seq: [choose(seq, row) for _ in range(count[seq])] for seq in pending}

    monkeypatch.setattr(Engine, "load", classmethod(loaded))
    monkeypatch.setattr(Engine, "can_draft", True)
    monkeypatch.setattr(Engine, "draft", draft)
    return asked


def test_generate_says_what_drafting_was_worth(
    shipped: Path, run: Run, drafting: list[bool]
) -> None:
    options = ("-p", "import os", "-p", "x = ", "--max-tokens", "6", "--json")
    plain = json.loads(run("generate", shipped, *options)[1])["answers"]
    code, out, err = run("generate", shipped, *options, "--draft", "2")
    assert code == 0
    assert drafting == [False, True]
    answers = json.loads(out)["answers"]
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in plain]
    for answer in answers:
        assert (answer["drafted"], answer["accepted"], answer["steps"]) == (7, 0, 5)
        assert (answer["accepted_share"], answer["tokens_per_step"]) == (0, 1)
    assert err.endswith("\ndrafted 14, accepted 0 (0.0%), 1.00 tokens per step\n")
    assert not {"drafted", "steps"} & plain[0].keys()


def test_drafts_that_cannot_be_made_are_refused(shipped: Path, run: Run) -> None:
    code, _, err = run("generate", shipped, "-p", "x", "--draft", "-1")
    assert code == 2
    assert err.startswith("error: draft is -1; it must be")


def test_chat_answers_each_line_until_the_end_of_input(
    shipped: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n"))
    options = ("--template", template, "--max-tokens", "4", "--temperature", "0")
    code, out, err = run("chat", shipped, *options, "--threads", "1", "--device", "cpu")
    assert code == 0, err
    with open_engine(shipped) as engine:
        first = _greedy(engine, "user: hello\n")
        second = _greedy(engine, f"user: hello\nassistant: {first}\nuser: again\n")
    assert out == f"{first}\n{second}\n"


def test_chat_says_what_drafting_was_worth(
    shipped: Path,
    tmp_path: Path,
    run: Run,
    drafting: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    options = ("--template", template, "--max-tokens", "4", "--temperature", "0")
    code, _, err = run("chat", shipped, *options, "--draft", "3")
    assert code == 0, err
    assert drafting == [True]
    assert err.splitlines() == ["drafted 3, accepted 0 (0.0%), 1.00 tokens per step"] * 2


def _greedy(engine: Engine, prompt: str) -> str:
    assert engine.codec is not None
    ids = engine.codec.encode(prompt, add_bos=False)
    events = engine.generate([ids], GenerateOptions(max_tokens=4))
    return "".join(event.text for event in events)


def test_freeze_adds_graphs_on_the_same_weights(
    bundles: Bundles, tmp_path: Path, run: Run
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles.bundle(bundles.checkpoint()), bundle)
    weights = read_manifest(bundle).weights
    code, out, err = run("freeze", bundle, "1x1x32", "2x16x32")
    assert (code, err) == (0, "")
    files = [Path(line) for line in out.splitlines()]
    assert [file.is_file() for file in files] == [True, True]
    manifest = read_manifest(bundle)
    assert [graph.file for graph in manifest.graphs] == [file.name for file in files]
    assert manifest.weights == weights
    again = json.loads(run("freeze", bundle, "1x1x32", "--json")[1])
    assert [graph["file"] for graph in again["graphs"]] == [files[0].name]
    assert read_manifest(bundle) == manifest


def test_export_writes_a_bundle_and_one_line(
    bundles: Bundles, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    sizes = ("--context", "40", "--sequences", "2", "--max-step", "8", "--dialect", "ort")
    code, shown, err = run("export", bundles.checkpoint(), out, *sizes, "--static", "1x1x8")
    assert (code, shown, err) == (0, "", f"wrote {out}\n")
    manifest = read_manifest(out)
    capacity = manifest.capacity
    assert (capacity.context, capacity.sequences, capacity.max_step) == (40, 2, 8)
    assert manifest.exporter.options["dialect"] == "ort"
    assert len(manifest.graphs) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    code, shown, _ = run("export", bundles.checkpoint(), out, "--overwrite", "--json")
    assert code == 0
    assert json.loads(shown) == {"bundle": str(out)}
    assert read_manifest(out).capacity.context == 4096


def test_export_leaves_the_mtp_block_out_when_told(
    bundles: Bundles, tmp_path: Path, run: Run
) -> None:
    checkpoint = bundles.checkpoint("window_only", with_draft=True)
    for flags, has_draft in (((), True), (("--draft",), True), (("--no-draft",), False)):
        out = tmp_path / f"out{len(flags)}{has_draft}"
        assert run("export", checkpoint, out, "--context", "40", *flags)[0] == 0
        assert (read_manifest(out).draft is not None) is has_draft
        assert (out / "draft.onnx").is_file() is has_draft


def test_export_takes_pinned_rows_and_a_unified_raw_cache(tmp_path: Path, run: Run) -> None:
    options = ("--pinned", "3", "--raw", "unified", "--context", "64")
    code, _, _ = run("export", "tiny:deepseek_v4", tmp_path / "out", *options)
    assert code == 0
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.capacity.pinned, manifest.planners.raw.pinned) == (3, 3)
    assert manifest.layouts[CacheKind.RAW].sharing is RowSharing.UNIFIED
    _, shown, _ = run("inspect", tmp_path / "out")
    assert "3 pinned, unified rows" in shown
    code, _, err = run("export", "tiny:deepseek_v4", tmp_path / "no", "--raw", "both")
    assert (code, (tmp_path / "no").exists()) == (2, False)
    assert "per_stream" in err
