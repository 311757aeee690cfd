"""Bad input to any command: one line on stderr, `error: ...`, and exit 2; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.bundles import Bundles

from cachegraph.tools.commands import COMMANDS

pytestmark = pytest.mark.r1
Run = Callable[..., tuple[int, str, str]]

# Words in capitals are replaced by paths of the fixture below.
CASES: dict[str, tuple[str, str]] = {
    # export
    "export without places": ("export", "'[CHECKPOINT] OUT'"),
    "export with one place": ("export CHECKPOINT", "got 1 places, wanted CHECKPOINT OUT"),
    "export from nowhere": ("export NOWHERE OUT", "NOWHERE"),
    "export of a folder without a config": ("export EMPTY OUT", "config.json"),
    "export of an unknown shipped model": ("export tiny:gpt OUT", "tiny:gpt"),
    "export of an unknown preset": (
        "export --preset deepseek-v9 --no-weights OUT",
        "deepseek-v9",
    ),
    "a preset with weights": (
        "export --preset deepseek-v4-flash OUT",
        "--preset and --no-weights go together",
    ),
    "no weights without a preset": (
        "export CHECKPOINT OUT --no-weights",
        "--preset and --no-weights go together",
    ),
    "export onto a bundle": ("export CHECKPOINT BUNDLE", "holds a bundle already"),
    "export onto another folder": ("export CHECKPOINT FULL", "exists and is no bundle"),
    "overwrite of another folder": (
        "export CHECKPOINT FULL --overwrite",
        "exists and is no bundle",
    ),
    "export onto a file": ("export CHECKPOINT FILE", "exists and is no bundle"),
    "unknown dialect": ("export CHECKPOINT OUT --dialect c", "--dialect"),
    "unknown weights": ("export CHECKPOINT OUT --weights int3", "--weights"),
    "unknown cache type": ("export CHECKPOINT OUT --cache q4_0", "--cache"),
    "unknown index cache type": ("export CHECKPOINT OUT --index-cache 8", "--index-cache"),
    "q8_0 of rows of an odd width": (
        "export CHECKPOINT OUT --cache q8_0",
        "raw cache: q8_0 stores rows in blocks of 32 values, and the width 20",
    ),
    "q8_0 of index keys of an odd width": (
        "export CHECKPOINT OUT --index-cache q8_0",
        "lid cache: q8_0 stores rows in blocks of 32 values, and the width 14",
    ),
    "context 0": ("export CHECKPOINT OUT --context 0", "--context"),
    "context that is no number": ("export CHECKPOINT OUT --context many", "--context"),
    "sequences 0": ("export CHECKPOINT OUT --sequences 0", "--sequences"),
    "max step 0": ("export CHECKPOINT OUT --max-step 0", "--max-step"),
    "static size in words": ("export CHECKPOINT OUT --static big", "STREAMSxSTEPxCONTEXT"),
    "static size of zeros": ("export CHECKPOINT OUT --static 0x1x8", "STREAMSxSTEPxCONTEXT"),
    "static size too large": ("export CHECKPOINT OUT --static 9x1x8", "streams is 9"),
    "quantised experts of the ort dialect, all of them": (
        "export CHECKPOINT OUT --dialect ort --weights int8 --experts all",
        "use experts=chosen",
    ),
    # generate
    "generate without a bundle": ("generate", "Missing argument"),
    "generate from nowhere": ("generate NOWHERE --prompt x", "is no bundle"),
    "generate without a prompt": ("generate TEXT", "nothing to continue"),
    "generate from no tokenizer": ("generate BUNDLE --prompt x", "has no tokenizer"),
    "a prompt file that is missing": ("generate TEXT --prompt-file NOWHERE", "No such file"),
    "a prompt file that is no text": ("generate TEXT --prompt-file BINARY", "BINARY"),
    "a prompt longer than the context": ("generate TEXT --prompt-file LONG", "context holds"),
    "no new tokens": ("generate TEXT --prompt x --max-tokens 0", "--max-tokens"),
    "negative temperature": ("generate TEXT --prompt x --temperature -1", "temperature"),
    "top-p above 1": ("generate TEXT --prompt x --top-p 2", "top_p"),
    "negative top-k": ("generate TEXT --prompt x --top-k -2", "top_k"),
    "min-p above 1": ("generate TEXT --prompt x --min-p 3", "min_p"),
    "penalty 0": ("generate TEXT --prompt x --repetition-penalty 0", "repetition_penalty"),
    "temperature that is no number": ("generate TEXT -p x --temperature nan", "temperature"),
    "empty stop string": ("generate TEXT --prompt x --stop EMPTY_STRING", "stop string"),
    "unknown device": ("generate TEXT --prompt x --device tpu", "no device 'tpu'"),
    "negative threads": ("generate TEXT --prompt x --threads -1", "--threads"),
    # chat
    "chat without a template": ("chat TEXT", "template"),
    "chat without a tokenizer": ("chat BUNDLE", "has no tokenizer"),
    "chat from nowhere": ("chat NOWHERE", "is no bundle"),
    # logits
    "logits from nowhere": ("logits NOWHERE --tokens IDS --out NPY", "is no bundle"),
    "no tokens file": ("logits BUNDLE --tokens NOWHERE --out NPY", "No such file"),
    "a text as tokens": ("logits BUNDLE --tokens FILE --out NPY", "is no .npy file"),
    "an empty file as tokens": ("logits BUNDLE --tokens NOTHING --out NPY", "is no .npy file"),
    "a table as tokens": ("logits BUNDLE --tokens TABLE --out NPY", "holds shape (2, 3)"),
    "floats as tokens": (
        "logits BUNDLE --tokens FLOATS --out NPY",
        "one dimension of integers",
    ),
    "no tokens at all": ("logits BUNDLE --tokens NONE --out NPY", "holds no tokens"),
    "objects as tokens": ("logits BUNDLE --tokens OBJECTS --out NPY", "is no .npy file"),
    "a token beyond the vocabulary": (
        "logits BUNDLE --tokens BEYOND --out NPY",
        "id 131 is not in the vocabulary",
    ),
    "more tokens than the context": (
        "logits BUNDLE --tokens MANY --out NPY",
        "sequence 0 is full",
    ),
    "chunks in words": ("logits BUNDLE --tokens IDS --out NPY --chunks a", "--chunks 'a'"),
    "chunks of 0": ("logits BUNDLE --tokens IDS --out NPY --chunks 3,0", "1 or more"),
    "no chunks": ("logits BUNDLE --tokens IDS --out NPY --chunks EMPTY_STRING", "--chunks ''"),
    "out in no folder": ("logits BUNDLE --tokens IDS --out NOWHERE/x.npy", "is no folder"),
    # freeze
    "freeze nowhere": ("freeze NOWHERE 1x1x32", "is no bundle"),
    "freeze without sizes": ("freeze BUNDLE", "SxPxN"),
    "freeze of words": ("freeze BUNDLE small", "STREAMSxSTEPxCONTEXT"),
    "freeze beyond the ladder": ("freeze BUNDLE 1x99x32", "step is 99"),
    "freeze below top-k": ("freeze BUNDLE 1x1x1", "context is 1"),
}


@pytest.fixture(scope="session")
def places(bundles: Bundles, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("places")
    found = {
        "CHECKPOINT": bundles.checkpoint(),
        "BUNDLE": bundles.bundle(bundles.checkpoint()),
        "TEXT": bundles.bundle("tiny:deepseek_v4"),
    }
    for folder in ("EMPTY", "FULL"):
        found[folder] = root / folder
        found[folder].mkdir()
    (root / "FULL" / "mine.txt").write_text("mine")
    files = {"FILE": b"some text", "BINARY": b"\xff\xfe\x00\x81", "NOTHING": b""}
    files["LONG"] = b"def read(self):\n" * 200
    for name, data in files.items():
        found[name] = root / name
        found[name].write_bytes(data)
    arrays = {
        "IDS": np.arange(5),
        "TABLE": np.zeros((2, 3), np.int64),
        "FLOATS": np.zeros(3),
        "NONE": np.zeros(0, np.int64),
        "OBJECTS": np.array([1, "x"], object),
        "BEYOND": np.array([1, 131]),
        "MANY": np.zeros(101, np.int64),
    }
    for name, array in arrays.items():
        found[name] = root / f"{name}.npy"
        np.save(found[name], array)
    for name in ("NOWHERE", "OUT", "NPY"):
        found[name] = root / name
    return {**{name: str(path) for name, path in found.items()}, "EMPTY_STRING": ""}


def _listing(places: dict[str, str]) -> dict[Path, int]:
    roots = (Path(places["NOWHERE"]).parent, Path(places["BUNDLE"]))
    return {p: p.stat().st_mtime_ns for root in roots for p in root.rglob("*")}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_2(name: str, places: dict[str, str], run: Run) -> None:
    line, message = CASES[name]
    before = _listing(places)
    code, out, err = run(*(_placed(word, places) for word in line.split()))
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert _placed(message, places) in err
    assert (code, out) == (2, "")
    assert _listing(places) == before


def _placed(word: str, places: dict[str, str]) -> str:
    for name in sorted(places, key=len, reverse=True):
        if word == name or word.startswith(f"{name}/"):
            return places[name] + word.removeprefix(name)
    return word


def test_every_command_has_cases() -> None:
    """Those of plan and inspect lie beside their other tests."""
    elsewhere = {"plan", "inspect", "bench"}
    assert {line.split()[0] for line, _ in CASES.values()} == set(COMMANDS) - elsewhere
