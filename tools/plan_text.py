"""How `cachegraph plan` prints the plan of each step: for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cachegraph.models.manifest import Manifest
from cachegraph.runtime.batch import IntArray
from cachegraph.tools.plan_steps import CacheUse, CallReport, StepReport
from cachegraph.tools.text_table import columns

_MAX_RUNS = 8  # pieces of a list shown before it is cut
_NOTHING = "-"


def step_lines(number: int, step: StepReport, manifest: Manifest) -> Iterator[str]:
    """One step as text: its calls, and for each the inputs and the rows of every cache."""
    calls = len(step.calls)
    noun = "graph call" if calls == 1 else "graph calls"
    yield f"step {number}: {step.tokens} tokens for each sequence, {calls} {noun}"
    for index, call in enumerate(step.calls, 1):
        yield from _call_lines(index, call, manifest)


def _call_lines(index: int, call: CallReport, manifest: Manifest) -> Iterator[str]:
    ubatch, bucket = call.plan.ubatch, call.bucket
    real, padded = ubatch.tokens.size, bucket.tokens
    yield (
        f" call {index}: bucket {bucket.name}, S={bucket.streams} P={bucket.step} "
        f"N={bucket.context}; {real} tokens in {padded} rows, logits of "
        f"{call.plan.wanted_rows.size} in {bucket.out_rows}"
    )
    for stream, seq in enumerate(ubatch.streams):
        first = int(ubatch.positions[stream * ubatch.step])
        yield f"  sequence {seq}: positions {_span(first, first + ubatch.step - 1)}"
    closing = [f"{kind.value} {count}" for kind, count in call.num_blocks.items() if count]
    pooled = call.plan.pooled
    if pooled is None:
        yield f"  blocks that close: {', '.join(closing) or 'none'}"
    else:
        yield f"  pools made anew: {pooled.new_pools.size} of {pooled.num_pools}"
    rows = [
        (
            row.name,
            _shape(row.shape, call),
            short(call.logical[row.name]),
            _padding(call, row.name),
        )
        for row in manifest.contract.host_rows
    ]
    yield from columns(rows, ("input", "shape", "logical", "padding"))
    uses = [_use_cells(use) for use in call.caches]
    yield from columns(uses, ("cache", "writes", "spare rows", "reads"))


def _shape(dims: Sequence[int | str], call: CallReport) -> str:
    sizes = (str(d) if isinstance(d, int) else f"{d}={call.dims[d]}" for d in dims)
    return f"[{', '.join(sizes)}]"


def _padding(call: CallReport, name: str) -> str:
    """What fills the buffer beyond the logical entries, in buffer order."""
    logical, padded = call.logical[name], call.padded[name]
    if logical.ndim > padded.ndim:  # rows of T: logical [s, p, ...], buffer [S*P, ...]
        padded = padded.reshape(call.dims["S"], call.dims["P"], *padded.shape[1:])
    is_padding = np.full(padded.shape, True)
    is_padding[tuple(slice(size) for size in logical.shape)] = False
    return short(padded[is_padding])


def _use_cells(use: CacheUse) -> tuple[str, ...]:
    return use.kind.value, short(use.written), short(use.spare), short(use.read)


def short(values: IntArray) -> str:
    """Integers as runs: 0..5, 7, 3 x4; cut after a few runs, with the count of all."""
    flat = values.ravel().tolist()
    if not flat:
        return _NOTHING
    runs: list[str] = []
    start = 0
    while start < len(flat) and len(runs) < _MAX_RUNS:
        end = _run_end(flat, start, 0)
        if end - start > 1:
            runs.append(f"{flat[start]} x{end - start}")
        else:
            end = _run_end(flat, start, 1)
            end = end if end - start > 2 else start + 1
            runs.append(_span(flat[start], flat[end - 1]))
        start = end
    return (
        " ".join(runs) if start == len(flat) else f"{' '.join(runs)} ... ({len(flat)} in all)"
    )


def _run_end(flat: Sequence[int], start: int, rise: int) -> int:
    end = start + 1
    while end < len(flat) and flat[end] == flat[end - 1] + rise:
        end += 1
    return end


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


def steps_json(steps: Sequence[StepReport]) -> dict[str, object]:
    """The same, with every list whole."""
    return {
        "steps": [
            {"tokens": step.tokens, "calls": [_call_json(call) for call in step.calls]}
            for step in steps
        ]
    }


def _call_json(call: CallReport) -> dict[str, object]:
    bucket, ubatch = call.bucket, call.plan.ubatch
    return {
        "bucket": {
            "name": bucket.name,
            "streams": bucket.streams,
            "step": bucket.step,
            "context": bucket.context,
            "closes": [kind.value for kind in bucket.closes],
            "all_rows": bucket.all_rows,
        },
        "dims": dict(call.dims),
        "sequences": list(ubatch.streams),
        "tokens_per_stream": ubatch.step,
        "blocks": {kind.value: count for kind, count in call.num_blocks.items()},
        "logits": int(call.plan.wanted_rows.size),
        "inputs": {
            name: {"logical": call.logical[name].tolist(), "padded": padded.tolist()}
            for name, padded in call.padded.items()
        },
        "caches": {
            use.kind.value: {
                "written": use.written.tolist(),
                "spare": use.spare.tolist(),
                "read": use.read.tolist(),
            }
            for use in call.caches
        },
    }
