"""Where the originals' checkpoints are wrong: rule 11, and the rules of the steps in between.

A step of a scenario that a rule names may differ, and so may those after it, which start from its
state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cachegraph.runtime.checkpoint_book import MAX_DELTA_TOKENS
from cachegraph.tools.conformance.checkpoints import DELTA_MODE, step_of
from cachegraph.tools.conformance.prepared import Prepared, prepare, prepared_rules
from cachegraph.tools.conformance.rules import Fields, Rule

RULE_11 = Rule(
    number=11,
    why="one decode is recorded for each save, and of a coupled token only its first sequence; "
    "the limit counts batch rows; growing drops the save; a failed capture restores the base",
    ours="counted and limited by sequence, over all decodes since the save, which growing keeps; "
    "what cannot be recorded voids the checkpoint, and nothing is restored from it",
    covers=lambda scenario: (),
)
_STATE_ROWS = 8  # of the shortest ring


class _Watch:
    """The originals' per-step checkpoint, as far as its faults go."""

    def __init__(self) -> None:
        self.selected: int | None = None
        self.capacity = 0
        self.is_saved = False
        self.num_decodes = 0
        self.has_device = True

    def is_fault(self, op: Mapping[str, Any]) -> bool:
        """Take an operation other than a decode; whether rule 11 speaks of it."""
        if op["op"] == "backend":
            self.has_device = op["present"]
        elif op["op"] == "discard":
            self.is_saved = False
        elif op["op"] == "save" and self.selected == DELTA_MODE:
            self.is_saved, self.num_decodes = op["use_gpu"], 0
        elif op["op"] == "init":
            return self._init(op["mode"], op["max_tokens"])
        return False

    def _init(self, mode: int, max_tokens: int) -> bool:
        is_bad = mode == DELTA_MODE and not 0 < max_tokens <= MAX_DELTA_TOKENS
        self.selected = None if is_bad else mode
        if mode != DELTA_MODE or is_bad or max_tokens <= self.capacity:
            return False
        grows_live = self.is_saved
        self.capacity, self.is_saved = max_tokens, False
        return grows_live

    def is_faulty_decode(self, case: Prepared) -> bool:
        """Take a decode; whether the originals lose something of it."""
        if not self.is_saved:
            return False
        self.num_decodes += 1
        step = case.step
        positions = [] if step.positions is None else step.positions.tolist()
        places = [
            (seq, position % _STATE_ROWS)
            for position, owners in zip(positions, step.owners, strict=True)
            for seq in owners
        ]
        return (
            self.num_decodes > 1
            or self.selected != DELTA_MODE
            or not self.has_device
            or len(positions) > self.capacity
            or len(places) > len(positions)
            or len(set(places)) < len(places)
        )


def checkpoint_rules(record: Mapping[str, Any]) -> list[tuple[Rule, Fields]]:
    """The rules that apply to a scenario of level `ckpt`, and the steps that each covers."""
    count = len(record["in"]["ops"])
    first: dict[int, tuple[Rule, int]] = {}
    for rule, at in _faults(record):
        first.setdefault(rule.number, (rule, at))
    return [
        (rule, tuple(f"steps[{step}]" for step in range(at, count)))
        for rule, at in first.values()
    ]


def _faults(record: Mapping[str, Any]) -> Iterator[tuple[Rule, int]]:
    watch = _Watch()
    for at, op in enumerate(record["in"]["ops"]):
        if op["op"] != "decode":
            if watch.is_fault(op):
                yield RULE_11, at
            continue
        case = step_of(record, op)
        for rule, fields in prepared_rules(case):
            if "ok" in fields:
                yield rule, at
        if prepare(case)["ok"] and watch.is_faulty_decode(case):
            yield RULE_11, at
