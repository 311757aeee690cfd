"""The tensors of the MTP block: names, shapes and what they may be stored as.

The block is an ordinary layer under `mtp.0.` with two projections and norms in front and a head
of its own; embedding and vocabulary head are the main model's. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterable

from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.tensors import block_tensors, canonical_name
from cachegraph.models.tensor_specs import TensorKind, TensorSpec

DRAFT_PREFIX = "mtp.0"
# A config may count MTP layers that were never saved: only this tensor says that there is one.
_EVIDENCE = f"{DRAFT_PREFIX}.e_proj.weight"


def has_draft(names: Iterable[str]) -> bool:
    """Whether the tensor names of a checkpoint, in any spelling, include the MTP block."""
    return any(canonical_name(name) == _EVIDENCE for name in names)


def draft_table(config: DeepseekV4Config) -> tuple[TensorSpec, ...]:
    """Every tensor of the MTP block that is not the main model's too."""
    hidden, streams, prefix = config.hidden_size, config.hc_mult, f"{DRAFT_PREFIX}."
    matrix, parameter = TensorKind.MATRIX, TensorKind.PARAMETER
    rows: tuple[tuple[str, TensorKind, tuple[int, ...]], ...] = (
        ("e_proj.weight", matrix, (hidden, hidden)),
        ("h_proj.weight", matrix, (hidden, hidden)),
        ("enorm.weight", parameter, (hidden,)),
        ("hnorm.weight", parameter, (hidden,)),
        ("norm.weight", parameter, (hidden,)),
        ("hc_head_fn", parameter, (streams, streams * hidden)),
        ("hc_head_base", parameter, (streams,)),
        ("hc_head_scale", parameter, (1,)),
    )
    own = (
        TensorSpec(name=prefix + name, kind=kind, shape=shape) for name, kind, shape in rows
    )
    return (*block_tensors(config.draft, 0, prefix), *own)
