"""What every recurrent layer of a step shares: the plan of states, and sizes taken from it.

States are kept column by column of the plan: those of all streams in column 0, then in column 1. In
that order a product over [columns, streams] broadcasts what belongs to a stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder

from cachegraph.models.recurrent_spec import RecurrentFields


@dataclass(frozen=True, kw_only=True, slots=True)
class StateStep:
    """Shared values of one step: S streams of P tokens, KR columns of kept states.

    kept_tokens [KR, S]: tokens of T after which states are kept; those of a padded stream may be
    another stream's. kept_rows [KR*S]: rows of a state cache that take them, each once.
    """

    plan: RecurrentFields[ir.Value]
    kept_tokens: ir.Value
    kept_rows: ir.Value
    num_streams: ir.Value  # [1]: S
    num_steps: ir.Value  # [1]: P


def state_step(op: OpBuilder, plan: RecurrentFields[ir.Value], tokens: ir.Value) -> StateStep:
    """Emit the shared values; of the graph input `tokens` [S, P] only the shape is used."""
    by_column = op.Transpose(plan.state_write_dst_idxs, perm=[1, 0])
    return StateStep(
        plan=plan,
        kept_tokens=op.Transpose(plan.state_write_src_idxs, perm=[1, 0]),
        kept_rows=op.Reshape(by_column, [-1]),
        num_streams=op.Shape(tokens, start=0, end=1),
        num_steps=op.Shape(tokens, start=1, end=2),
    )
