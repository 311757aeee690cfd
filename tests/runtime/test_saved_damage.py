"""Files that must not be restored and saves that fail: live state and old files stay."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.bundles import Bundles, with_capacity
from support.engines import Engines, snapshot, text
from support.sessions import append

from cachegraph.models.errors import CachegraphError, ContractError, StateFileError
from cachegraph.runtime.engine import Engine

pytestmark = pytest.mark.r2

DESCRIPTION, DIGEST = "cachegraph_state", "sha256"


def hold(engine: Engine, seq: int, length: int) -> None:
    engine.clear(seq)
    append(engine, seq, text(seq, 0, length, engine.manifest.vocab_size))


@pytest.fixture
def state(engine: Engine, tmp_path: Path) -> Path:
    """Two sequences in a file; the engine holds others since."""
    hold(engine, 0, 22)
    hold(engine, 1, 9)
    engine.save(tmp_path / "state")
    hold(engine, 0, 31)
    hold(engine, 3, 14)
    return tmp_path / "state"


def refused(engine: Engine, path: Path, pattern: str) -> None:
    """StateFileError, and every live byte and all bookkeeping as it was."""
    check = Untouched(engine)
    with pytest.raises(StateFileError, match=pattern) as caught:
        engine.restore(path)
    assert str(path) in str(caught.value)
    check()


class Untouched:
    """Says whether an engine is what it was."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._seen()

    def _seen(self) -> list[Any]:
        engine = self._engine
        rows = hashlib.sha256(b"".join(r.tobytes() for r in snapshot(engine).values()))
        kept = [(engine.tokens(s), engine.reachable(s)) for s in range(engine.num_sequences)]
        return [rows.digest(), kept]

    def __call__(self) -> None:
        assert self._seen() == self._before


def rewrite(path: Path, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change description and tensors of a file and hash the description anew."""
    with safe_open(path, framework="numpy") as file:
        description = json.loads(file.metadata()[DESCRIPTION])
    tensors = load_file(path)
    edit(description, tensors)
    words = json.dumps(description)
    digest = hashlib.sha256(words.encode()).hexdigest()
    save_file(tensors, path, {DESCRIPTION: words, DIGEST: digest})


def test_a_file_cut_off_anywhere_is_refused(engine: Engine, state: Path) -> None:
    data = state.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    inside = np.linspace(0, len(data) - 1, 40).astype(int).tolist()
    near = [1, 7, 8, 9, header // 2, header - 1, header, header + 1, header + 4, len(data) - 2]
    offsets = [*inside, *near]
    assert len(offsets) == 50
    check = Untouched(engine)
    for offset in offsets:
        state.write_bytes(data[:offset])
        with pytest.raises(StateFileError, match="damaged"):
            engine.restore(state)
    check()
    state.write_bytes(data + b"\0")
    refused(engine, state, "damaged")


def test_no_flipped_bit_goes_unseen(engine: Engine, state: Path) -> None:
    """Every byte of the header's ends, and bits all over the header and the rows."""
    data = state.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    rng = np.random.default_rng(11)
    places = {*range(24), *range(header - 24, header + 24)}
    places |= set(rng.integers(header, size=70).tolist())
    places |= set(rng.integers(header, len(data), size=70).tolist())
    check = Untouched(engine)
    for place in sorted(places):
        flipped = bytearray(data)
        flipped[place] ^= 1 << int(rng.integers(8))
        state.write_bytes(flipped)
        with pytest.raises(StateFileError):
            engine.restore(state)
    check()


def test_what_is_no_state_is_refused(engine: Engine, state: Path) -> None:
    folder = state.parent
    refused(engine, folder / "nowhere", "does not exist")
    refused(engine, folder, "cannot be read")
    for name, data in {"empty": b"", "text": b"import os\n" * 99}.items():
        (folder / name).write_bytes(data)
        refused(engine, folder / name, "damaged or no saved state")
    save_file({"x": np.zeros(3, np.float32)}, folder / "other")
    refused(engine, folder / "other", "no state saved by cachegraph")


def test_a_damaged_description_is_refused(engine: Engine, state: Path) -> None:
    tensors = load_file(state)
    with safe_open(state, framework="numpy") as file:
        held = file.metadata()
    words = held[DESCRIPTION].replace('"length":22', '"length":21')
    assert words != held[DESCRIPTION]
    save_file(tensors, state, {**held, DESCRIPTION: words})
    refused(engine, state, "its description is damaged")


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_format_is_refused_by_its_number(
    engine: Engine, state: Path, version: Any
) -> None:
    rewrite(state, lambda description, _: description.update(format_version=version))
    refused(engine, state, f"has state format {version!r}; this cachegraph reads 1")


def test_a_missing_field_is_named(engine: Engine, state: Path) -> None:
    rewrite(state, lambda description, _: description["sequences"][1].pop("raw_first"))
    refused(engine, state, "field 'sequences.1.raw_first': Field required")


@pytest.mark.parametrize(
    "name", ["0.tokens", "1.cache.0.raw", "0.cache.1.lid", "0.cache.2.hca"]
)
def test_a_missing_component_is_named(engine: Engine, state: Path, name: str) -> None:
    """A03: whether its description knows it or not."""
    data = state.read_bytes()
    rewrite(state, lambda _, tensors: tensors.pop(name))
    refused(engine, state, f"tensor '{name}' is missing")
    state.write_bytes(data)

    def forget(description: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors.pop(name)
        description["tensors"].pop(name)

    rewrite(state, forget)
    refused(engine, state, f"tensor '{name}' is missing")


def test_a_tensor_of_another_form_or_unknown_name_is_refused(
    engine: Engine, state: Path
) -> None:
    data = state.read_bytes()
    for view in (lambda x: x.view(np.int32), lambda x: x.reshape(x.shape[1], x.shape[0])):
        rewrite(state, lambda _, t, v=view: t.update({"0.cache.0.raw": v(t["0.cache.0.raw"])}))
        refused(engine, state, "tensor '0.cache.0.raw' is damaged")
        state.write_bytes(data)
    rewrite(state, lambda _, tensors: tensors.update({"2.tokens": np.zeros(2, np.int64)}))
    refused(engine, state, "tensor '2.tokens' is not in its description")


def test_fewer_rows_than_the_windows_need_are_refused(engine: Engine, state: Path) -> None:
    """A file whose writer kept too little, with hashes that agree."""
    data = state.read_bytes()
    cases = {
        "raw_first": (17, "sequence 0: raw rows begin at 17, inside the window"),
        "state_first": (
            {"csa": 17, "hca": 2},
            "sequence 0: csa state rows begin at 17, the open window at 16",
        ),
    }
    for field, (value, pattern) in cases.items():
        rewrite(state, lambda d, _, f=field, v=value: d["sequences"][0].update({f: v}))
        refused(engine, state, pattern)
        state.write_bytes(data)


def test_the_difference_to_a_foreign_bundle_is_named(
    engine: Engine, engines: Engines, bundles: Bundles, state: Path
) -> None:
    """A09: other weights, another ratio, another model; other options of the same are fine."""
    cases = (
        ({"seed": 2}, "weights_sha256 is '.*' there and '.*' here"),
        ({"hca_ratio": 16}, r"config\..*hca.* is .* there and .* here|config\.compress_r"),
        ({"name": "csa_only"}, r"config\."),
    )
    for sizes, pattern in cases:
        foreign = Engine.load(
            bundles.bundle(bundles.checkpoint(**sizes)), device="cpu", threads=1
        )
        with foreign:
            append(foreign, 0, [1, 2, 3])
            refused(foreign, state, "saved by another bundle: (" + pattern + ")")
    for choices in ({"select": "mask"}, {"gather": "elements"}):
        engines.get(**choices).restore(state)


def test_changed_weights_are_found_before_a_restore(
    engine: Engine, state: Path, tmp_path: Path
) -> None:
    """A file of the same size and header, with one byte changed."""
    folder = tmp_path / "changed"
    shutil.copytree(engine.folder, folder)
    weights = folder / engine.manifest.weights.file
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with (
        Engine.load(folder, device="cpu", threads=1) as changed,
        pytest.raises(ContractError, match=r"sha256 .* the manifest says"),
    ):
        changed.restore(state)


class FullDisk:
    """Lets so many bytes through, then there is no space left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.left = room
        opened = Path.open

        def limited(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            file = opened(path, mode, *args, **options)
            return _Limited(file, self) if "w" in mode else file

        monkeypatch.setattr(Path, "open", limited)


class _Limited:
    def __init__(self, file: Any, disk: FullDisk) -> None:
        self._file, self._disk = file, disk

    def __enter__(self) -> _Limited:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        if len(data) > self._disk.left:
            self._file.write(data[: self._disk.left])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._file.write(data))


def no_space(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("moment", ["first byte", "middle", "fsync", "rename"])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_full_disk_leaves_the_old_file_and_no_other(
    engine: Engine, state: Path, monkeypatch: pytest.MonkeyPatch, moment: str, is_new: bool
) -> None:
    old = state.read_bytes()
    target = state.with_name("new") if is_new else state
    check = Untouched(engine)
    match moment:
        case "first byte":
            FullDisk(monkeypatch, 0)
        case "middle":
            FullDisk(monkeypatch, 5000)
        case "fsync":
            monkeypatch.setattr(os, "fsync", no_space)
        case "rename":
            monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises((OSError, CachegraphError), match="No space left"):
        engine.save(target)
    monkeypatch.undo()
    check()
    assert [path.name for path in state.parent.iterdir()] == ["state"]
    assert state.read_bytes() == old
    engine.restore(state)
    assert [engine.length(seq) for seq in range(4)] == [22, 9, 0, 14]


KILLED = """
import os, sys
from pathlib import Path
from cachegraph.runtime.engine import Engine

bundle, state, moment = sys.argv[1:]
with Engine.load(bundle, device="cpu", threads=1, spinning=False) as engine:
    engine.append([7] * 30)
    if moment == "rename":
        Path.replace = lambda *args: os._exit(9)
    else:
        os.fsync = lambda *args: os._exit(9)
    engine.save(state)
"""


@pytest.mark.parametrize("moment", ["fsync", "rename"])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_killed_save_leaves_the_old_file(
    engine: Engine, state: Path, moment: str, is_new: bool
) -> None:
    """A05: what is left beside it is whole or refused, and in nobody's way."""
    old = state.read_bytes()
    target = state.with_name("new") if is_new else state
    args = [sys.executable, "-c", KILLED, str(engine.folder), str(target), moment]
    assert subprocess.run(args, check=False).returncode == 9
    assert state.read_bytes() == old
    for path in state.parent.iterdir():
        if path == state:
            continue
        assert path.name.endswith(".partial")
        assert path != target
        engine.clear()
        if moment == "rename":  # all bytes were written: then it says what was saved
            engine.restore(path)
            assert engine.tokens(0) == (7,) * 30
    if is_new:
        with pytest.raises(StateFileError, match="does not exist"):
            engine.restore(target)
    engine.restore(state)
    assert [engine.length(seq) for seq in (0, 1)] == [22, 9]
    engine.save(target)
    engine.restore(target)


def test_a_foreign_capacity_is_not_a_foreign_bundle(engines: Engines, state: Path) -> None:
    other = engines.get(capacity=with_capacity(sequences=2, context=64))
    assert other.restore(state) == {0: 0, 1: 1}
