"""The whole text model: embedding, layers of (attention site, expert site), final head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.cache_ops import Stored, stored_caches
from cachegraph.graphgen.deepseek_v4.attention import Attention, Caches
from cachegraph.graphgen.deepseek_v4.hyper import HyperConnection, HyperHead, merge
from cachegraph.graphgen.deepseek_v4.router import Router
from cachegraph.graphgen.deepseek_v4.step import StepValues, emit_step
from cachegraph.graphgen.layers.experts import ExpertSizes, expert_layer, swiglu
from cachegraph.graphgen.layers.linear import (
    FLOAT_TYPES,
    DequantLinear,
    FloatLinear,
    NBitsLinear,
    as_float,
    linear,
)
from cachegraph.graphgen.layers.norm import RMSNorm
from cachegraph.graphgen.weights.parameter import tensor, vector
from cachegraph.models.contract import (
    CARRIED,
    EMBEDDINGS,
    LOGITS,
    OUT_ROWS,
    STREAMS,
    CacheKind,
    Contract,
)
from cachegraph.models.deepseek_v4.config import DeepseekV4Config
from cachegraph.models.deepseek_v4.contract import stream_width
from cachegraph.models.export_options import ExportOptions, WeightType


class SharedExpert(nn.Module):
    """The expert that every token uses."""

    def __init__(self, config: DeepseekV4Config, prefix: str, options: ExportOptions) -> None:
        super().__init__()
        self.size, self.limit = config.shared_expert_size, config.swiglu_limit
        names = [f"{prefix}.w1.weight", f"{prefix}.w3.weight"]
        self.gate_up = linear(names, config.hidden_size, 2 * self.size, options)
        self.down = linear([f"{prefix}.w2.weight"], self.size, config.hidden_size, options)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """x [T, D] -> [T, D]."""
        gate, up = op.Split(self.gate_up(op, x), [self.size] * 2, axis=-1, _outputs=2)
        return self.down(op, swiglu(op, gate, up, self.limit))


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Checkpoint names of one layer's experts; `prefix` such as layers.3.ffn.experts."""

    prefix: str

    def gate_up(self, expert: int) -> list[str]:
        """W1 (gate) then W3 (up), each [I, D]."""
        return [f"{self.prefix}.{expert}.{part}.weight" for part in ("w1", "w3")]

    def down(self, expert: int) -> str:
        """W2, [D, I]."""
        return f"{self.prefix}.{expert}.w2.weight"


def expert_sizes(config: DeepseekV4Config) -> ExpertSizes:
    """Sizes of every expert layer of a model."""
    return ExpertSizes(
        hidden=config.hidden_size,
        inner=config.expert_size,
        count=config.num_experts,
        chosen=config.experts_per_token,
        limit=config.swiglu_limit,
    )


class FeedForward(nn.Module):
    """Routed experts times the routed scaling factor, plus the shared expert."""

    def __init__(
        self, config: DeepseekV4Config, layer: int, prefix: str, options: ExportOptions
    ) -> None:
        super().__init__()
        self.scale = config.routed_scaling_factor
        self.gate = Router(config, f"{prefix}.gate", layer < config.num_hash_layers)
        self.experts = expert_layer(
            expert_sizes(config), ExpertNames(f"{prefix}.experts"), options
        )
        self.shared_experts = SharedExpert(config, f"{prefix}.shared_experts", options)

    def forward(self, op: OpBuilder, x: ir.Value, values: StepValues) -> ir.Value:
        """x [T, D] -> [T, D]."""
        routed = self.experts(op, x, self.gate(op, x, values))
        return op.Add(op.Mul(routed, self.scale), self.shared_experts(op, x))


class Layer(nn.Module):
    """One block: attention and experts, each inside a hyper-connection site.

    `prefix` is the checkpoint path, such as layers.3.
    """

    def __init__(
        self, config: DeepseekV4Config, layer: int, prefix: str, options: ExportOptions
    ) -> None:
        super().__init__()
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.hc_attn = HyperConnection(config, f"{prefix}.hc_attn")
        self.attn_norm = RMSNorm(vector(f"{prefix}.attn_norm.weight", hidden), eps)
        self.attn = Attention(config, config.layer_kinds[layer], f"{prefix}.attn", options)
        self.hc_ffn = HyperConnection(config, f"{prefix}.hc_ffn")
        self.ffn_norm = RMSNorm(vector(f"{prefix}.ffn_norm.weight", hidden), eps)
        self.ffn = FeedForward(config, layer, f"{prefix}.ffn", options)

    def forward(
        self,
        op: OpBuilder,
        streams: ir.Value,
        values: StepValues,
        caches: Mapping[CacheKind, Stored],
    ) -> tuple[ir.Value, Caches]:
        """streams [T, M, D] -> streams and the updated caches by kind."""
        x, mix = self.hc_attn(op, streams)
        output, written = self.attn(op, self.attn_norm(op, x), values, caches)
        streams = merge(op, streams, output, mix)
        x, mix = self.hc_ffn(op, streams)
        output = self.ffn(op, self.ffn_norm(op, x), values)
        return merge(op, streams, output, mix), written


class Embedding(nn.Module):
    """Token ids to rows; gathered rows are cast, so that a halved table stays halved in memory."""

    def __init__(self, config: DeepseekV4Config, options: ExportOptions) -> None:
        super().__init__()
        self.form = WeightType.F32 if options.weights.bits else options.weights
        self.weight = tensor(
            lambda read: read("embed.weight"),
            [config.vocab_size, config.hidden_size],
            FLOAT_TYPES[self.form],
        )

    def forward(self, op: OpBuilder, tokens: ir.Value) -> ir.Value:
        """tokens [T] -> [T, D]."""
        return as_float(op, op.Gather(self.weight, tokens, axis=0), self.form)


def vocabulary_head(
    config: DeepseekV4Config, options: ExportOptions
) -> FloatLinear | NBitsLinear | DequantLinear:
    """Hidden rows [O, D] to logits [O, V]."""
    return linear(["head.weight"], config.hidden_size, config.vocab_size, options, rows=("O",))


class DeepseekV4(nn.Module):
    """Tokens and plans in, logits of the requested rows and updated caches out."""

    def __init__(self, config: DeepseekV4Config, options: ExportOptions) -> None:
        super().__init__()
        self.config, self.pinned = config, options.capacity.pinned
        self.embed = Embedding(config, options)
        layers = range(config.num_layers)
        self.layers = nn.ModuleList(
            [Layer(config, layer, f"layers.{layer}", options) for layer in layers]
        )
        self.hc_head = HyperHead(config, "hc_head")
        self.norm = RMSNorm(vector("norm.weight", config.hidden_size), config.rms_norm_eps)
        self.head = vocabulary_head(config, options)

    def forward(
        self, op: OpBuilder, contract: Contract, inputs: Mapping[str, ir.Value]
    ) -> dict[str, ir.Value]:
        """Graph inputs by contract name -> graph outputs by contract name.

        The contract's caches say which layers the graph holds: all, or those of one stage.
        """
        layers = list(dict.fromkeys(spec.layer for spec in contract.caches))
        values = emit_step(op, self.config.part(layers), inputs, self.pinned)
        streams = self._first_streams(op, values, inputs)
        outputs: dict[str, ir.Value] = {}
        for number in layers:
            specs = [spec for spec in contract.caches if spec.layer == number]
            stored = stored_caches(specs, inputs)
            streams, written = self.layers[number](op, streams, values, stored)
            outputs |= {s.out_name: written[s.kind].part(s.part) for s in specs}
        if OUT_ROWS in inputs:
            wanted = op.Gather(streams, inputs[OUT_ROWS], axis=0)  # [O, M, D]
            outputs[EMBEDDINGS] = self.norm(op, self.hc_head(op, wanted))
            outputs[LOGITS] = self.head(op, outputs[EMBEDDINGS])
        if any(row.name == STREAMS for row in contract.outputs):
            outputs[STREAMS] = op.Reshape(streams, [-1, stream_width(self.config)])
        return outputs

    def _first_streams(
        self, op: OpBuilder, values: StepValues, inputs: Mapping[str, ir.Value]
    ) -> ir.Value:
        """[T, M, D]: the embedded tokens, or what the stage before gives."""
        m, d = self.config.hc_mult, self.config.hidden_size
        if CARRIED in inputs:
            return op.Reshape(inputs[CARRIED], [-1, m, d])
        rows = self.embed(op, values.tokens)  # [T, D]
        return op.Expand(op.Unsqueeze(rows, [1]), [1, m, 1])
