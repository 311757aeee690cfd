"""The tensor table of a DeepSeek-V4 checkpoint, with or without the MTP block."""

from __future__ import annotations

from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.draft_tensors import draft_table
from cachegraph.models.deepseek_v4.tensors import (
    canonical_name,
    fused_parts,
    fused_shape,
    is_left_out,
    refusal,
    scale_name,
    tensor_table,
)
from cachegraph.models.tensor_specs import Fused, TensorTable


def checkpoint_table(config: DeepseekV4Config, *, with_draft: bool = False) -> TensorTable:
    """Every tensor of the model; those of the MTP block are left out unless `with_draft`."""

    def fused(name: str) -> Fused | None:
        shape = fused_shape(config, name)
        return None if shape is None else Fused(shape=shape, parts=fused_parts(config, name))

    return TensorTable(
        family="DeepSeek-V4",
        specs=(*tensor_table(config), *(draft_table(config) if with_draft else ())),
        canonical=canonical_name,
        fused=fused,
        scale=scale_name,
        is_left_out=lambda name: not with_draft and is_left_out(name),
        refusal=refusal,
    )
