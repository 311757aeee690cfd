"""Typed reads from a JSON object that collect every fault before one error is raised.

Config parsers of all families use it. It knows types and which keys were asked for, never what a
key means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite

from cachegraph.models.errors import ConfigError


class Fields:
    """A JSON object, the keys read from it so far, and the faults found so far.

    A read that fails notes the fault and returns None, so that the caller goes on to the next key.
    `where` goes in front of every key in messages.
    """

    def __init__(self, raw: Mapping[str, object], where: str = "") -> None:
        self._raw = raw
        self._where = where
        self._seen: set[str] = set()
        self.faults: list[str] = []

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._raw.get(key) is not None

    def is_list(self, key: str) -> bool:
        """Whether the key holds a list."""
        return isinstance(self._raw.get(key), list | tuple)

    def note(self, fault: str) -> None:
        """Add a fault found by the caller."""
        self.faults.append(fault)

    def integer(self, key: str) -> int | None:
        """A required whole number; true and 3.0 are none."""
        value = self._required(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self._wrong(key, value, "a whole number")
        return None

    def number(self, key: str) -> float | None:
        """A required finite number."""
        value = self._required(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            return float(value)
        self._wrong(key, value, "a finite number")
        return None

    def flag(self, key: str, *, default: bool) -> bool | None:
        """An optional true or false; `default` where it is absent or null."""
        if not self.has(key):
            self._seen.add(key)
            return default
        value = self._required(key)
        if isinstance(value, bool):
            return value
        self._wrong(key, value, "true or false")
        return None

    def text(self, key: str) -> str | None:
        """A required string."""
        value = self._required(key)
        if isinstance(value, str):
            return value
        self._wrong(key, value, "a string")
        return None

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A required list of whole numbers."""
        value = self._required(key)
        if isinstance(value, list | tuple) and all(type(item) is int for item in value):
            return tuple(value)
        self._wrong(key, value, "a list of whole numbers")
        return None

    def strings(self, key: str) -> tuple[str, ...] | None:
        """A required list of strings."""
        value = self._required(key)
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self._wrong(key, value, "a list of strings")
        return None

    def child(self, key: str) -> Fields | None:
        """An object one level down, sharing this fault list."""
        value = self._required(key)
        if isinstance(value, Mapping):
            below = Fields(value, f"{self._where}{key}.")
            below.faults = self.faults
            return below
        self._wrong(key, value, "an object")
        return None

    def expect(self, key: str, *allowed: object, why: str) -> None:
        """An optional key that, where given, must be one of `allowed` (null counts as absent)."""
        self._seen.add(key)
        value = self._raw.get(key)
        if value is not None and not any(_same(value, each) for each in allowed):
            wanted = " or ".join(repr(each) for each in allowed)
            self.note(f"{self._where}{key} is {value!r}; only {wanted} is supported: {why}")

    def ignore(self, keys: Iterable[str]) -> None:
        """Keys that may be there and are not read."""
        self._seen.update(keys)

    def unread(self) -> tuple[str, ...]:
        """Keys that no read, expectation or ignore list has named, in file order."""
        return tuple(f"{self._where}{key}" for key in self._raw if key not in self._seen)

    def finish(self) -> None:
        """Note every key that nobody asked for."""
        for key in self.unread():
            self.note(f"{key} is not a key of this model; remove it if it changes nothing")

    def _required(self, key: str) -> object:
        self._seen.add(key)
        value = self._raw.get(key)
        if value is None:
            self.note(f"{self._where}{key} is missing")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> None:
        if value is not None:  # a missing key has its fault already
            self.note(f"{self._where}{key} is {_short(value)}; it must be {wanted}")


def raise_faults(what: str, faults: Iterable[str]) -> None:
    """One ConfigError that lists all faults; nothing where there are none."""
    lines = list(dict.fromkeys(faults))
    if lines:
        raise ConfigError(
            f"{what} cannot be used:" + "".join(f"\n  - {line}" for line in lines)
        )


def _same(value: object, wanted: object) -> bool:
    """Equality that keeps true apart from 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and value == wanted


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
