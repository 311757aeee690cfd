"""Level `prepare`: everything that one step needs, in the order in which the originals refuse.

Ids first; a predictor pass gets a raw plan only; then the raw plan, the plans of CSA, HCA and LID
and their validation. A reserve plan looks at no positions and has no raw plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from cachegraph.tools.conformance.helpers import helper_fields, seq_ids_valid
from cachegraph.tools.conformance.ours import PAD, RAW_LISTS, answer, no_plan, reserve_plan
from cachegraph.tools.conformance.rules import RULES, Fields, Rule, rules_for
from cachegraph.tools.conformance.scenario import CompressorCase, Scenario, parse_step

CSA_RATIO, HCA_RATIO = 4, 128
NAMES = ("csa", "hca", "lid")  # in the order of a scenario's compressors
_NO_STREAMS: Mapping[str, Any] = {"s0": 0, "s1": 0, "strm": [], "idxs": []}
PLANNED = ("ok", "raw", *NAMES, "csa_sinfo", "csa_graph_n_stream", "csa_n_kv", "hca_n_kv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A step of a model. step: with compressors CSA, HCA, LID. is_predictor: raw plan only."""

    step: Scenario
    is_predictor: bool
    lacks: tuple[str, ...]


def parse_prepared(record: Mapping[str, Any], given: Mapping[str, Any]) -> Prepared:
    """A scenario of level `prepare`, or a decode of level `ckpt`.

    given: what the record's input says, with `n_ctx`, `model`, `kv` and `batch`.
    """
    ratios, model = given["model"]["ratios"], given["model"]
    csa, hca = (_padded_rows(given["n_ctx"], ratio) for ratio in (CSA_RATIO, HCA_RATIO))
    overlapping = CompressorCase(ratio=CSA_RATIO, overlap=True, ring_rows=8, rows=csa)
    plain = CompressorCase(ratio=HCA_RATIO, overlap=False, ring_rows=HCA_RATIO, rows=hca)
    heads = model.get("nextn_predict_layers", 0)
    is_predictor = bool(
        model.get("mtp")
        and given.get("mtp_op")
        and heads > 0
        and ratios[len(ratios) - heads] == 0
    )
    kinds = {CSA_RATIO: ("csa", "lid"), HCA_RATIO: ("hca",)}
    return Prepared(
        step=parse_step(
            record, given, (overlapping, plain, overlapping), given.get("reserve", False)
        ),
        is_predictor=is_predictor,
        lacks=tuple(n for ratio, names in kinds.items() if ratio not in ratios for n in names),
    )


def prepare(case: Prepared) -> dict[str, Any]:
    """Every recorded field, as we answer it."""
    step = case.step
    if not seq_ids_valid(step):
        return {"ok": False, "sizes": _sizes(case, has_caches=False)}
    out: dict[str, Any] = {"ok": True, "sizes": _sizes(case, has_caches=not case.is_predictor)}
    refusal = {"ok": False, "sizes": out["sizes"]}
    answers = {} if step.reserve else answer(step)
    if answers and not answers["raw"]["ok"]:
        return refusal
    plans = _plans(case, answers)
    if plans is None:
        return refusal
    out["raw"] = answers["raw"]["raw"] if answers else _no_raw()
    helpers = helper_fields(step)
    return out | {
        **plans,
        "csa_sinfo": _NO_STREAMS if case.is_predictor else helpers["comp_sinfo"],
        "csa_graph_n_stream": 1 if case.is_predictor else helpers["graph_n_stream"],
        "csa_n_kv": plans["csa"]["n_kv"],
        "hca_n_kv": plans["hca"]["n_kv"],
    }


def prepared_rules(case: Prepared) -> list[tuple[Rule, Fields]]:
    """The rules that apply, with the fields that each covers here."""
    found: list[tuple[Rule, Fields]] = []
    if case.lacks and not case.is_predictor:
        found.append((next(rule for rule in RULES if rule.number == 10), ("sizes", *PLANNED)))
    for rule, fields in rules_for(case.step):
        here = tuple(name for field in fields for name in _here(case, field))
        if here:
            found.append((rule, here))
    return found


def recorded_prepare(out: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded fields that are compared: texts are not, an assert is a refusal."""
    if "assert" in out or not out["ok"]:
        return {"ok": False, "sizes": out["sizes"]}
    return {name: value for name, value in out.items() if name != "errors"}


def _plans(case: Prepared, answers: Mapping[str, Any]) -> dict[str, Any] | None:
    """The plans of CSA, HCA and LID; None where one is refused or not valid."""
    step = case.step
    if case.is_predictor:
        return dict.fromkeys(NAMES, no_plan())
    if step.reserve:
        cases = zip(NAMES, step.compressors, strict=True)
        plans = {name: reserve_plan(step, sizes) for name, sizes in cases}
    else:
        entries = dict(zip(NAMES, answers["comp"], strict=True))
        kept = {name: entry for name, entry in entries.items() if name not in case.lacks}
        if any(e is None or e["refused"] or not e["valid"] for e in kept.values()):
            return None
        plans = {name: entry["plan"] for name, entry in kept.items()}
    return plans | dict.fromkeys(case.lacks, no_plan())


def _here(case: Prepared, field: str) -> Fields:
    """What a field of level `plan` is called here; a refusal there is one of everything."""
    step, (part, _, rest) = case.step, field.partition(".")
    if part == "raw":
        if step.reserve:
            return ()
        return (rest,) if rest else PLANNED
    if not part.startswith("comp[") or case.is_predictor:
        return ()
    if rest == "reserve":
        name = NAMES[int(part[5:-1])]
        return (name, f"{name}_n_kv") if step.reserve else ()
    if step.reserve:
        return ()
    if rest.startswith("plan."):
        return (f"{NAMES[int(part[5:-1])]}.{rest.removeprefix('plan.')}",)
    return PLANNED


def _sizes(case: Prepared, *, has_caches: bool) -> dict[str, int]:
    sizes = {"cache_n_stream": case.step.num_streams if has_caches else 1}
    for name, compressor in zip(NAMES, case.step.compressors, strict=True):
        is_there = has_caches and name not in case.lacks
        sizes[f"{name}_kv"] = compressor.rows if is_there else 0
        sizes[f"{name}_state"] = compressor.ring_rows if is_there else 0
    return sizes


def _no_raw() -> dict[str, Any]:
    none: dict[str, Any] = {name: [] for name in RAW_LISTS}
    streams = {"sinfo_write": _NO_STREAMS, "sinfo_read": _NO_STREAMS}
    return none | streams | {"graph_n_stream": 1, "n_kv": 0}


def _padded_rows(context: int, ratio: int) -> int:
    rows = ceil(context / ratio)
    return ceil(rows / PAD) * PAD
