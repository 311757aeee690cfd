"""What every recurrent layer of a step shares: the plan of states, and sizes taken from it.

States are kept column by column of the plan: first those of all streams in column 0, then in column
1. In that order a product over [kept columns, streams] broadcasts what belongs to a stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder

from cachegraph.models.recurrent_spec import RecurrentFields


@dataclass(frozen=True, kw_only=True, slots=True)
class StateStep:
    """Shared values of one step; KR columns of kept states, S streams of P tokens.

    kept_tokens [KR, S]: tokens of T after which states are kept. kept_rows [KR*S]: rows of a state
    cache that take them, each once.
    """

    plan: RecurrentFields[ir.Value]
    kept_tokens: ir.Value
    kept_rows: ir.Value
    num_streams: ir.Value  # [1]: S
    num_steps: ir.Value  # [1]: P


def state_step(
    op: OpBuilder, plan: RecurrentFields[ir.Value], tokens: ir.Value
) -> StateStep:
    """Emit the shared values; of the graph input `tokens` [S, P] only the shape is used."""
    columns = op.Transpose(plan.state_write_dst_idxs, perm=[1, 0])
    return StateStep(
        plan=plan,
        kept_tokens=op.Transpose(plan.state_write_src_idxs, perm=[1, 0]),
        kept_rows=op.Reshape(columns, [-1]),
        num_streams=op.Shape(tokens, start=0, end=1),
        num_steps=op.Shape(tokens, start=1, end=2),
    )


def iota(op: OpBuilder, length: ir.Value) -> ir.Value:
    """0 .. length-1 as int64 [length]; length has shape [1]."""
    return op.Range(0, op.Squeeze(length, [0]), 1)
