"""The text of the tiny models: Python's standard library, some files of it held out.

Every machine with Python has this text. A file is held out by a hash of its name alone, so the
split is the same on every machine and in every run. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SKIPPED = ("site-packages", "/test", "/idlelib", "lib2to3")  # substrings of "/name"
HELD_OUT_ONE_IN = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file: its posix path below the library's root, and its text."""

    name: str
    text: str

    @property
    def data(self) -> bytes:
        """The text as UTF-8: the bytes that bits per byte are counted over."""
        return self.text.encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Sources to train on and sources held out, each in order of name."""

    train: tuple[Source, ...]
    held_out: tuple[Source, ...]


def is_held_out(name: str) -> bool:
    """Whether the file of this posix name is kept out of training."""
    return int(hashlib.sha1(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def is_used(name: str) -> bool:
    """Whether a file belongs to the corpus at all: tests, IDLE and lib2to3 do not."""
    return not any(part in f"/{name}" for part in SKIPPED)


def split(sources: Iterable[Source]) -> Corpus:
    """Sort sources by name and split them by `is_held_out`."""
    ordered = sorted(sources, key=lambda source: source.name)
    return Corpus(
        train=tuple(s for s in ordered if not is_held_out(s.name)),
        held_out=tuple(s for s in ordered if is_held_out(s.name)),
    )


def read_sources(root: Path) -> list[Source]:
    """Every `.py` file below root that `is_used`; bytes that are not UTF-8 are dropped."""
    named = ((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py"))
    return [
        Source(name=name, text=path.read_text(encoding="utf-8", errors="ignore"))
        for name, path in named
        if is_used(name)
    ]


def stdlib_corpus() -> Corpus:
    """The corpus of the running interpreter's standard library."""
    return split(read_sources(Path(sysconfig.get_paths()["stdlib"])))
