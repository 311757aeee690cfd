"""Running a file of planner vectors and telling what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cachegraph.tools.conformance.checkpoint_rules import checkpoint_rules
from cachegraph.tools.conformance.checkpoints import Replayer, recorded_steps
from cachegraph.tools.conformance.ours import answer
from cachegraph.tools.conformance.pooled import PooledReplayer, recorded_pooled
from cachegraph.tools.conformance.pooled_rules import pooled_rules
from cachegraph.tools.conformance.prepared import (
    parse_prepared,
    prepare,
    prepared_rules,
    recorded_prepare,
)
from cachegraph.tools.conformance.rules import Fields, Rule, rules_for
from cachegraph.tools.conformance.scenario import Scenario, load_scenarios, parse

MISSING = "nothing"
POOLED = "pooled"  # of a record without a level: a scenario of the pooled index
_WIDTH = 160  # characters of a value shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A scenario that answers otherwise than recorded: the first such field, and how many more."""

    id: str
    kind: str
    field: str
    got: Any
    wanted: Any
    more: int = 0

    def __str__(self) -> str:
        more = f" (and {self.more} more fields)" if self.more else ""
        return (
            f"{self.id} {self.kind} {self.field}: "
            f"got {_short(self.got)}, wanted {_short(self.wanted)}{more}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorReport:
    """What a run found. deviations: (scenario id, rule numbers). not_run: scenarios by level."""

    num_matching: int
    differences: tuple[Difference, ...]
    deviations: tuple[tuple[str, tuple[int, ...]], ...]
    not_run: Mapping[str, int]

    @property
    def is_ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def lines(self) -> Iterator[str]:
        """One line for each scenario that differs, then the counts; the last line sums up."""
        yield from (str(difference) for difference in self.differences)
        rules = Counter(number for _, numbers in self.deviations for number in numbers)
        if rules:
            listed = ", ".join(f"rule {number}: {rules[number]}" for number in sorted(rules))
            yield f"deviations on purpose by rule: {listed}"
        for level, count in self.not_run.items():
            yield f"{count} not run (level {level})"
        yield (
            f"{self.num_matching} match, {len(self.differences)} differ, "
            f"{len(self.deviations)} deviate on purpose"
        )


def run_vectors(path: Path | str) -> VectorReport:
    """Compare our plans with a file of vectors; ConfigError where it is none."""
    matching = 0
    differences = []
    deviations = []
    not_run: Counter[str] = Counter()
    for record in load_scenarios(Path(path)):
        level = record.get("level", POOLED)
        if level not in LEVELS:
            not_run[level] += 1
            continue
        difference, numbers = judge(record, LEVELS[level](record))
        if difference is not None:
            differences.append(difference)
        elif numbers:
            deviations.append((record["id"], numbers))
        else:
            matching += 1
    return VectorReport(
        num_matching=matching,
        differences=tuple(differences),
        deviations=tuple(deviations),
        not_run=dict(not_run),
    )


class Answers(NamedTuple):
    """A scenario's answers, ours and the recorded ones, and the rules that apply to its input."""

    got: dict[str, Any]
    wanted: dict[str, Any]
    rules: list[tuple[Rule, Fields]]


def judge(
    record: Mapping[str, Any], answers: Answers
) -> tuple[Difference | None, tuple[int, ...]]:
    """The first difference that no rule covers, else the numbers of the rules that were needed."""
    got, wanted = flatten(answers.got), flatten(answers.wanted)
    names = [
        name
        for name in {**wanted, **got}
        if got.get(name, MISSING) != wanted.get(name, MISSING)
    ]
    rules = answers.rules
    open_fields = [
        name
        for name in names
        if not any(_covers(field, name) for _, fields in rules for field in fields)
    ]
    if open_fields:
        first = open_fields[0]
        difference = Difference(
            id=record["id"],
            kind=record["kind"],
            field=first,
            got=got.get(first, MISSING),
            wanted=wanted.get(first, MISSING),
            more=len(open_fields) - 1,
        )
        return difference, ()
    needed = (
        rule.number
        for rule, fields in rules
        if any(_covers(field, name) for name in names for field in fields)
    )
    return None, tuple(needed)


def _plan(record: Mapping[str, Any]) -> Answers:
    scenario = parse(record)
    return Answers(answer(scenario), recorded(scenario), rules_for(scenario))


def _prepare(record: Mapping[str, Any]) -> Answers:
    case = parse_prepared(record, record["in"])
    return Answers(prepare(case), recorded_prepare(record["out"]), prepared_rules(case))


def _ckpt(record: Mapping[str, Any]) -> Answers:
    wanted = {"steps": recorded_steps(record["out"]["steps"])}
    return Answers({"steps": Replayer(record).run()}, wanted, checkpoint_rules(record))


def _pooled(record: Mapping[str, Any]) -> Answers:
    wanted = {"steps": recorded_pooled(record)}
    return Answers({"steps": PooledReplayer(record).run()}, wanted, pooled_rules(record))


LEVELS: Mapping[str, Callable[[Mapping[str, Any]], Answers]] = {
    "plan": _plan,
    "prepare": _prepare,
    "ckpt": _ckpt,
    POOLED: _pooled,
}


def recorded(scenario: Scenario) -> dict[str, Any]:
    """The recorded fields that are compared: texts are not, an assert is a refusal."""
    out = {
        name: value for name, value in scenario.recorded.items() if name != "seq_ids_errors"
    }
    out["comp_sinfo_errors"] = bool(out["comp_sinfo_errors"])
    out["raw"] = {name: value for name, value in out["raw"].items() if name != "errors"}
    out["comp"] = [None if entry is None else _entry(entry) for entry in out["comp"]]
    return out


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves by path, such as comp[0].plan.n_visible; a list of numbers is one leaf."""
    if isinstance(value, dict):
        parts = [(f"{name}.{key}" if name else key, item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        parts = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    else:
        return {name: value}
    return {path: leaf for at, item in parts for path, leaf in flatten(item, at).items()}


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    if "assert" in entry:
        return {"refused": True}
    kept = {name: value for name, value in entry.items() if not name.endswith("errors")}
    return {"refused": False} | kept


def _covers(field: str, name: str) -> bool:
    return name == field or name.startswith((f"{field}.", f"{field}["))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
