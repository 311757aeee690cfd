"""Typed reads that collect faults."""

from __future__ import annotations

import pytest

from cachegraph.models.errors import ConfigError
from cachegraph.models.fields import Fields, raise_faults

pytestmark = pytest.mark.r0


def test_every_wrong_type_is_noted_and_read_as_none():
    fields = Fields({"a": True, "b": "1", "c": float("nan"), "d": [1, True], "e": [1], "f": 3})
    reads = [
        fields.integer("a"),
        fields.integer("b"),
        fields.number("c"),
        fields.integers("d"),
        fields.strings("e"),
        fields.text("f"),
        fields.child("f"),
        fields.integer("g"),
    ]
    assert reads == [None] * 8
    assert [fault.split()[0] for fault in fields.faults] == list("abcdeffg")
    assert fields.faults[-1] == "g is missing"


def test_right_types_are_returned():
    fields = Fields({"a": 3, "b": 4, "c": [1, 2], "d": ["x"], "e": {"f": 1.5}})
    assert (fields.integer("a"), fields.number("b"), fields.integers("c")) == (3, 4.0, (1, 2))
    assert fields.strings("d") == ("x",)
    below = fields.child("e")
    assert below is not None
    assert below.number("f") == 1.5
    assert fields.faults == []


def test_a_child_shares_the_fault_list_and_says_where():
    fields = Fields({"outer": {"inner": "x", "extra": 1}})
    below = fields.child("outer")
    assert below is not None
    below.integer("inner")
    below.finish()
    assert "outer.inner is 'x'" in fields.faults[0]
    assert "outer.extra" in fields.faults[1]


@pytest.mark.parametrize(("value", "allowed"), [(1, True), (True, 1), (0, False), ("a", "b")])
def test_expect_keeps_true_apart_from_one(value, allowed):
    fields = Fields({"key": value})
    fields.expect("key", allowed, why="of a reason")
    assert len(fields.faults) == 1
    assert "of a reason" in fields.faults[0]


def test_expect_takes_absent_and_null():
    fields = Fields({"key": None})
    fields.expect("key", 1, why="x")
    fields.expect("other", 1, why="x")
    fields.finish()
    assert fields.faults == []


def test_raise_faults_lists_each_once():
    with pytest.raises(ConfigError) as caught:
        raise_faults("it", ["one", "two", "one"])
    assert str(caught.value) == "it cannot be used:\n  - one\n  - two"
    raise_faults("it", [])
