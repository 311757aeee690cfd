"""The split of the tiny models' text: by name alone, so that held-out files stay held out."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachegraph.tools.dev.tiny.corpus import (
    Source,
    is_held_out,
    is_used,
    read_sources,
    split,
    stdlib_corpus,
)

pytestmark = pytest.mark.r0

# Held out when the shipped model was trained; a change of the rule would leak them.
SHIPPED_HELD_OUT = ("base64.py", "difflib.py", "enum.py", "locale.py", "xml/dom/pulldom.py")
SHIPPED_TRAIN = ("abc.py", "argparse.py", "asyncio/tasks.py", "typing.py", "zipfile.py")


@pytest.mark.parametrize("name", SHIPPED_HELD_OUT)
def test_files_held_out_of_the_shipped_model_stay_held_out(name: str) -> None:
    """The hash rule is the one the shipped model was trained under."""
    assert is_held_out(name)


@pytest.mark.parametrize("name", SHIPPED_TRAIN)
def test_files_of_the_shipped_training_set_stay_there(name: str) -> None:
    """The other side of the same rule."""
    assert not is_held_out(name)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ast.py", True),
        ("unittest/case.py", True),
        ("test/test_ast.py", False),
        ("unittest/test/support.py", False),
        ("idlelib/run.py", False),
        ("lib2to3/pytree.py", False),
        ("site-packages/numpy/core.py", False),
    ],
)
def test_tests_idle_lib2to3_and_packages_are_left_out(name: str, wanted: bool) -> None:
    """Only the library proper is text."""
    assert is_used(name) is wanted


def test_split_is_disjoint_complete_and_ordered() -> None:
    """Every source lands on exactly one side, in order of name, whatever order it came in."""
    sources = [Source(name=f"m{i:03}.py", text="") for i in reversed(range(200))]
    corpus = split(sources)
    train, held_out = ([s.name for s in side] for side in (corpus.train, corpus.held_out))
    assert train == sorted(train)
    assert held_out == sorted(held_out)
    assert sorted(train + held_out) == sorted(s.name for s in sources)
    assert held_out


def test_sources_are_named_by_posix_path_and_read_leniently(tmp_path: Path) -> None:
    """A byte that is not UTF-8 is dropped, and other files are not read."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_bytes(b"x = '\xff\xc3\xa9'\n")
    (tmp_path / "pkg" / "b.txt").write_text("no")
    (source,) = read_sources(tmp_path)
    assert source == Source(name="pkg/a.py", text="x = '\u00e9'\n")
    assert source.data == b"x = '\xc3\xa9'\n"


def test_the_running_library_has_both_sides() -> None:
    """About one file in forty is held out."""
    corpus = stdlib_corpus()
    share = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert 0.01 < share < 0.06
