"""The MTP block as a graph of its own: pairs of a token and the streams before it in, logits out.

Equations: specs of DeepSeek-V4, "MTP". Embedding and vocabulary matrix are the main graph's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.cache_ops import stored_caches
from cachegraph.graphgen.deepseek_v4.hyper import HyperHead
from cachegraph.graphgen.deepseek_v4.model import (
    DeepseekV4,
    Embedding,
    Layer,
    vocabulary_head,
)
from cachegraph.graphgen.deepseek_v4.step import emit_step
from cachegraph.graphgen.layers.linear import linear
from cachegraph.graphgen.layers.norm import RMSNorm
from cachegraph.graphgen.weights.parameter import share, vector
from cachegraph.models.contract import CARRIED, LOGITS, OUT_ROWS, STREAMS, Contract
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.contract import stream_width
from cachegraph.models.deepseek_v4.draft_tensors import DRAFT_PREFIX
from cachegraph.models.export_options import ExportOptions


class DraftInput(nn.Module):
    """The block's first streams: W_e RMS(embedding) in every stream, plus W_h RMS(stream)."""

    def __init__(self, config: DeepseekV4Config, prefix: str, options: ExportOptions) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(vector(f"{prefix}.enorm.weight", hidden), eps)
        self.hnorm = RMSNorm(vector(f"{prefix}.hnorm.weight", hidden), eps)
        self.e_proj = linear([f"{prefix}.e_proj.weight"], hidden, hidden, options)
        self.h_proj = linear(
            [f"{prefix}.h_proj.weight"], hidden, hidden, options, rows=("T", config.hc_mult)
        )

    def forward(self, op: OpBuilder, embedded: ir.Value, carried: ir.Value) -> ir.Value:
        """embedded [T, D] and carried [T, M, D] -> [T, M, D]; each stream has its own norm."""
        token = self.e_proj(op, self.enorm(op, embedded))
        before = self.h_proj(op, self.hnorm(op, carried))
        return op.Add(op.Unsqueeze(token, [1]), before)


class DraftBlock(nn.Module):
    """Pairs and raw plan in; logits of the rows asked for, all streams and the raw cache out."""

    def __init__(
        self, config: DeepseekV4Config, main: DeepseekV4, options: ExportOptions
    ) -> None:
        super().__init__(DRAFT_PREFIX)  # sets its weights' names apart from the main graph's
        self.config = config.draft
        self.embed = Embedding(config, options)
        self.input = DraftInput(config, DRAFT_PREFIX, options)
        self.layer = Layer(self.config, 0, DRAFT_PREFIX, options)
        self.hc_head = HyperHead(config, f"{DRAFT_PREFIX}.hc_head")
        norm = vector(f"{DRAFT_PREFIX}.norm.weight", config.hidden_size)
        self.norm = RMSNorm(norm, config.rms_norm_eps)
        self.head = vocabulary_head(config, options)
        share(self.embed, main.embed)
        share(self.head, main.head)

    def forward(
        self, op: OpBuilder, contract: Contract, inputs: Mapping[str, ir.Value]
    ) -> dict[str, ir.Value]:
        """Graph inputs by contract name -> graph outputs by contract name."""
        m, d = self.config.hc_mult, self.config.hidden_size
        values = emit_step(op, self.config, inputs)
        carried = op.Reshape(inputs[CARRIED], [-1, m, d])
        streams = self.input(op, self.embed(op, values.tokens), carried)
        caches = stored_caches(contract.caches, inputs)
        streams, written = self.layer(op, streams, values, caches)
        outputs = {s.out_name: written[s.kind].part(s.part) for s in contract.caches}
        wanted = op.Gather(streams, inputs[OUT_ROWS], axis=0)  # [O, M, D]
        outputs[LOGITS] = self.head(op, self.norm(op, self.hc_head(op, wanted)))
        outputs[STREAMS] = op.Reshape(streams, [-1, stream_width(self.config)])
        return outputs
