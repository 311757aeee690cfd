"""The whole text model: embedding, layers of (token mixer, experts), final read, head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from cachegraph.graphgen.cache_ops import Stored, stored_caches
from cachegraph.graphgen.layers.causal_conv import conv_step
from cachegraph.graphgen.layers.experts import ExpertSizes, expert_layer, swiglu
from cachegraph.graphgen.layers.linear import (
    FLOAT_TYPES,
    FloatLinear,
    as_float,
    joined,
    linear,
)
from cachegraph.graphgen.layers.routing import Routing
from cachegraph.graphgen.layers.state_step import state_step
from cachegraph.graphgen.qwen4_exp import delta, ngram
from cachegraph.graphgen.qwen4_exp.attention import Attention
from cachegraph.graphgen.qwen4_exp.delta import DeltaLayer, DeltaLayerStep
from cachegraph.graphgen.qwen4_exp.hyper import StreamRead, write
from cachegraph.graphgen.qwen4_exp.ngram import NgramEmbedding, NgramStep
from cachegraph.graphgen.qwen4_exp.step import (
    PooledStep,
    StepSizes,
    pooled_step,
    step_sizes,
)
from cachegraph.graphgen.weights.parameter import tensor
from cachegraph.models.contract import EMBEDDINGS, LOGITS, OUT_ROWS, CacheKind, Contract
from cachegraph.models.export_options import ExportOptions, WeightType
from cachegraph.models.ngram_spec import IDS, ROWS
from cachegraph.models.qwen4_exp.config import LayerKind, Qwen4ExpConfig
from cachegraph.models.qwen4_exp.tensors import expert_name
from cachegraph.models.recurrent_spec import RecurrentFields, recurrent_name


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValues:
    """Everything that the layers of one step share; None where no layer needs it."""

    sizes: StepSizes
    pooled: PooledStep | None
    delta: DeltaLayerStep | None
    ngram: NgramStep | None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Checkpoint names of one layer's experts."""

    layer: int

    def gate_up(self, expert: int) -> list[str]:
        """Gate then up, each [I, D]."""
        return [expert_name(self.layer, expert, part) for part in ("gate", "up")]

    def down(self, expert: int) -> str:
        """Down, [D, I]."""
        return expert_name(self.layer, expert, "down")


class SharedExpert(nn.Module):
    """The expert that every token uses, and how much of it each token takes."""

    def __init__(self, config: Qwen4ExpConfig, prefix: str, options: ExportOptions) -> None:
        super().__init__()
        self.size, hidden = config.shared_expert_size, config.hidden_size
        own = f"{prefix}.shared_expert"
        names = [f"{own}.gate_proj.weight", f"{own}.up_proj.weight"]
        self.gate_up = linear(names, hidden, 2 * self.size, options)
        self.down = linear([f"{own}.down_proj.weight"], self.size, hidden, options)
        self.share = FloatLinear(joined([f"{prefix}.shared_expert_gate.weight"]), hidden, 1)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """x [T, D] -> [T, D]."""
        gate, up = op.Split(self.gate_up(op, x), [self.size] * 2, axis=-1, _outputs=2)
        output = self.down(op, swiglu(op, gate, up, None))
        return op.Mul(output, op.Sigmoid(self.share(op, x)))


class Mlp(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(self, config: Qwen4ExpConfig, layer: int, options: ExportOptions) -> None:
        super().__init__()
        self.config, prefix = config, f"layers.{layer}.mlp"
        self.gate = FloatLinear(
            joined([f"{prefix}.gate.weight"]), config.hidden_size, config.num_experts
        )
        sizes = ExpertSizes(
            hidden=config.hidden_size,
            inner=config.expert_size,
            count=config.num_experts,
            chosen=config.experts_per_token,
            limit=None,
        )
        self.experts = expert_layer(sizes, ExpertNames(layer), options)
        self.shared_expert = SharedExpert(config, prefix, options)

    def forward(self, op: OpBuilder, x: ir.Value, sizes: StepSizes) -> ir.Value:
        """x [T, D] -> [T, D]."""
        scores = op.Softmax(self.gate(op, x), axis=-1)
        top = [self.config.experts_per_token]
        chosen, columns = op.TopK(scores, top, axis=-1, sorted=1, _outputs=2)
        total = op.ReduceSum(chosen, [1], keepdims=1)
        routing = Routing(
            scores, columns, op.Div(chosen, total), sizes.tokens, self.config.num_experts
        )
        routed = self.experts(op, x, routing)
        if not self.config.norm_topk_prob:
            routed = op.Mul(routed, total)
        return op.Add(routed, self.shared_expert(op, x))


class Layer(nn.Module):
    """One block: n-gram embedding where it has one, token mixer, experts."""

    def __init__(
        self, config: Qwen4ExpConfig, layer: int, options: ExportOptions, *, host_tables: bool
    ) -> None:
        super().__init__()
        prefix = f"layers.{layer}"
        if layer in config.ple_layers:
            self.ple = NgramEmbedding(config, layer, options, host_tables=host_tables)
        self.attn_read = StreamRead(config, f"{prefix}.attn_hyper_connection", options)
        self.is_delta = config.layer_kinds[layer] is LayerKind.GDN
        if self.is_delta:
            self.linear_attn = DeltaLayer(config, f"{prefix}.linear_attn", options)
        else:
            self.self_attn = Attention(config, f"{prefix}.self_attn", options)
        self.mlp_read = StreamRead(config, f"{prefix}.mlp_hyper_connection", options)
        self.mlp = Mlp(config, layer, options)

    def forward(
        self,
        op: OpBuilder,
        streams: ir.Value,
        values: StepValues,
        caches: Mapping[CacheKind, Stored],
    ) -> tuple[ir.Value, dict[CacheKind, Stored]]:
        """streams [T, M, D] -> streams and the written caches by kind."""
        written: dict[CacheKind, Stored] = {}
        if CacheKind.NGRAM_STATE in caches:
            assert values.ngram is not None
            cache = caches[CacheKind.NGRAM_STATE]
            streams, written[CacheKind.NGRAM_STATE] = self.ple(
                op, streams, values.ngram, cache
            )
        x, inject = self.attn_read(op, streams)
        if self.is_delta:
            output, own = self.linear_attn(op, x, values.delta, caches)
        else:
            output, own = self.self_attn(op, x, values.pooled, values.sizes, caches)
        streams = write(op, streams, output, inject)
        x, inject = self.mlp_read(op, streams)
        return write(op, streams, self.mlp(op, x, values.sizes), inject), written | own


class Embedding(nn.Module):
    """Token ids to rows; gathered rows are cast, so that a halved table stays halved in memory."""

    def __init__(self, config: Qwen4ExpConfig, options: ExportOptions) -> None:
        super().__init__()
        self.form = WeightType.F32 if options.weights.bits else options.weights
        self.weight = tensor(
            lambda read: read("embed_tokens.weight"),
            [config.vocab_size, config.hidden_size],
            FLOAT_TYPES[self.form],
        )

    def forward(self, op: OpBuilder, tokens: ir.Value) -> ir.Value:
        """tokens [T] -> [T, D]."""
        return as_float(op, op.Gather(self.weight, tokens, axis=0), self.form)


class Qwen4Exp(nn.Module):
    """Tokens and plans in, logits of the requested rows and updated caches out."""

    def __init__(
        self, config: Qwen4ExpConfig, options: ExportOptions, *, host_tables: bool
    ) -> None:
        super().__init__()
        self.config, self.options = config, options
        self.embed_tokens = Embedding(config, options)
        self.layers = nn.ModuleList(
            [
                Layer(config, layer, options, host_tables=host_tables)
                for layer in range(config.num_layers)
            ]
        )
        self.hyper_connection_mixer = StreamRead(
            config, "hyper_connection_mixer", options, is_final=True
        )
        self.lm_head = linear(
            ["lm_head.weight"], config.hidden_size, config.vocab_size, options, rows=("O",)
        )

    def forward(
        self, op: OpBuilder, contract: Contract, inputs: Mapping[str, ir.Value]
    ) -> dict[str, ir.Value]:
        """Graph inputs by contract name -> graph outputs by contract name."""
        values = self._step(op, inputs)
        tokens = op.Reshape(inputs["tokens"], [-1])
        rows = op.Unsqueeze(self.embed_tokens(op, tokens), [1])
        streams = op.Expand(rows, [1, self.config.hc_count, 1])
        outputs: dict[str, ir.Value] = {}
        for number in range(self.config.num_layers):
            specs = [spec for spec in contract.caches if spec.layer == number]
            stored = stored_caches(specs, inputs)
            streams, written = self.layers[number](op, streams, values, stored)
            outputs |= {s.out_name: written[s.kind].part(s.part) for s in specs}
        wanted = op.Gather(streams, inputs[OUT_ROWS], axis=0)  # [O, M, D]
        outputs[EMBEDDINGS], _ = self.hyper_connection_mixer(op, wanted)
        outputs[LOGITS] = self.lm_head(op, outputs[EMBEDDINGS])
        return outputs

    def _step(self, op: OpBuilder, inputs: Mapping[str, ir.Value]) -> StepValues:
        config, tokens = self.config, inputs["tokens"]
        sizes = step_sizes(op, tokens)
        kinds = config.layer_kinds
        pooled = None
        if LayerKind.QSA in kinds:
            pooled = pooled_step(op, config, inputs, sizes)
        if LayerKind.GDN not in kinds:
            return StepValues(sizes=sizes, pooled=pooled, delta=None, ngram=None)
        names = (recurrent_name(field) for field in RecurrentFields._fields)
        states = state_step(op, RecurrentFields(*(inputs[name] for name in names)), tokens)
        rule = delta.delta_rule(config, self.options)
        return StepValues(
            sizes=sizes,
            pooled=pooled,
            delta=DeltaLayerStep(
                states=states,
                conv=conv_step(op, states, delta.conv_sizes(config)),
                rule=rule.step(op, states),
            ),
            ngram=NgramStep(
                states=states,
                conv=conv_step(op, states, ngram.conv_sizes(config)),
                ids=inputs.get(IDS),
                rows=inputs.get(ROWS),
            )
            if config.ple_layers
            else None,
        )
