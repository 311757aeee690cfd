"""Layers with states, run as an engine would: plans, padding, caches; and their float64 twins.

A layer is a graph from the inputs of its tokens and one state cache to its output and the written
cache. Padded tokens and streams hold noise, which must reach nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnxscript import GraphBuilder, OpBuilder

from cachegraph.graphgen.cache_ops import CacheOps, Stored
from cachegraph.graphgen.layers.causal_conv import CausalConv, ConvSizes, conv_step
from cachegraph.graphgen.layers.gated_delta import (
    ChunkedDelta,
    DeltaSizes,
    DeltaTokens,
    FusedDelta,
)
from cachegraph.graphgen.layers.state_step import StateStep, state_step
from cachegraph.graphgen.weights.parameter import Read, Weight
from cachegraph.models.contract import CacheKind, DType
from cachegraph.models.recurrent_spec import RecurrentFields, RecurrentSpec, recurrent_rows
from cachegraph.runtime.planners.recurrent import Standing, plan_recurrent

Array = NDArray[Any]
Feeds = Mapping[str, Array]
Run = Callable[[Feeds], Sequence[Array]]
Values = Mapping[str, ir.Value]
# Of the tokens' values and the old states: the output and the kept states.
Layer = Callable[[OpBuilder, Values, ir.Value, StateStep], tuple[ir.Value, ir.Value]]
FLOAT = ir.DataType.FLOAT
PLAN_ROWS = recurrent_rows(CacheKind.RECURRENT_STATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A layer's graph. tokens: shape of one token's part of each input. width: of a state."""

    model: onnx.ModelProto
    tokens: Mapping[str, tuple[int, ...]]
    width: int


def delta_piece(rule: ChunkedDelta | FusedDelta) -> Piece:
    """The gated delta rule of a layer; its log decay is at most 0."""

    def layer(op: OpBuilder, x: Values, old: ir.Value, state: StateStep):
        tokens = DeltaTokens(*(x[name] for name in DeltaTokens._fields))
        return rule.emit(op, tokens, old, rule.step(op, state))  # type: ignore[arg-type]

    shapes = delta_tokens(rule.sizes)
    return _piece(layer, shapes, shapes["v"], rule.sizes.width, {}.__getitem__)


def delta_tokens(sizes: DeltaSizes) -> dict[str, tuple[int, ...]]:
    """Shape of one token's part of each input of the rule."""
    key, value = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
    gate = (sizes.value_heads,)
    return {"q": key, "k": key, "v": value, "beta": gate, "g": gate}


def conv_piece(sizes: ConvSizes, weight: Array, *, silu: bool) -> Piece:
    """A causal convolution with this weight [C, 1, K]."""
    conv = CausalConv(lambda read: read("w"), sizes, silu=silu)

    def layer(op: OpBuilder, x: Values, old: ir.Value, state: StateStep):
        return conv(op, x["x"], old, conv_step(op, state, sizes))

    shape = (sizes.channels,)
    return _piece(layer, {"x": shape}, shape, sizes.width, {"w": weight}.__getitem__)


def _piece(
    layer: Layer,
    tokens: Mapping[str, tuple[int, ...]],
    output: tuple[int, ...],
    width: int,
    read: Read,
) -> Piece:
    """output: shape of one token's part of it."""
    domains = {"": 21, "com.microsoft": 1}
    graph = ir.Graph(inputs=[], outputs=[], nodes=[], name="layer", opset_imports=domains)
    builder, ops = GraphBuilder(graph), CacheOps()
    op = builder.op

    def declare(name: str, shape: Sequence[int | str], dtype: ir.DataType) -> ir.Value:
        return builder.input(name, shape=ir.Shape(shape), type=ir.TensorType(dtype))

    ids = declare("tokens", ("S", "P"), ir.DataType.INT64)
    plan = RecurrentFields(
        *(
            declare(name, row.shape, ir.DataType.INT64)
            for name, row in zip(RecurrentFields._fields, PLAN_ROWS, strict=True)
        )
    )
    x = {name: declare(name, ("S", "P", *shape), FLOAT) for name, shape in tokens.items()}
    cache = Stored(dtype=DType.FLOAT32, values=declare("cache", ("rows", width), FLOAT))
    state = state_step(op, plan, ids)
    old = ops.read_rows(op, cache, plan.state_read_idxs, width, [-1, width])
    out, kept = layer(op, x, old, state)
    written = ops.write_rows(op, cache, state.kept_rows, kept, width).values
    shapes = {"out": ("S", "P", *output), "cache.out": ("rows", width)}
    for value, (name, shape) in zip((out, written), shapes.items(), strict=True):
        value.type, value.shape = ir.TensorType(FLOAT), ir.Shape(shape)
        builder.add_output(value, name)
    for weight in graph.initializers.values():
        if isinstance(weight, Weight):
            (part,) = weight.recipe.make(read)
            weight.const_value = ir.tensor(part.values, name=weight.name)
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    return Piece(model=model, tokens=tokens, width=width)


@dataclass(kw_only=True)
class StateHost:
    """Keeps the state cache of `sequences` sequences and feeds steps of their tokens.

    texts: of each sequence its values by input name, [length, ...].
    """

    piece: Piece
    spec: RecurrentSpec
    texts: Mapping[int, Feeds]
    run: Run
    cache: Array = field(init=False)
    standings: dict[int, Standing] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.start = len(self.texts) * self.spec.rows
        self.cache = np.zeros((self.start + 1 + 64, self.piece.width), np.float32)
        self.noise = np.random.default_rng(99)

    def length(self, sequence: int) -> int:
        """Tokens that a sequence has seen."""
        return self.standings.get(sequence, Standing()).length

    def step(
        self, counts: Mapping[int, int], bucket: tuple[int, int] | None = None
    ) -> dict[int, Array]:
        """Run the next `count` tokens of each sequence; their outputs. bucket: S, P."""
        streams, steps = bucket or (len(counts), max(counts.values()))
        feeds = self._feeds(counts, streams, steps)
        out, self.cache = self.run({**feeds, "cache": self.cache})
        assert np.isfinite(self.cache).all()
        outputs = {}
        for at, (seq, count) in enumerate(counts.items()):
            outputs[seq] = out[at, :count]
            stand = self.standings.get(seq, Standing())
            self.standings[seq] = stand.after(count, self.spec.snapshots)
        return outputs

    def state(self, sequence: int, length: int) -> Array:
        """The kept state of a sequence after so many tokens."""
        assert self.standings[sequence].reaches(length)
        return self.cache[self.spec.row(sequence, length)]

    def _feeds(self, counts: Mapping[int, int], streams: int, steps: int) -> dict[str, Array]:
        kept = self.spec.kept(steps)
        source = np.zeros((streams, kept), np.int64)
        target = self.start + 1 + np.arange(streams * kept).reshape(streams, kept)
        reads, sizes = np.full(streams, self.start), np.zeros(streams, np.int64)
        feeds = {
            name: self._noise(name, (streams, steps, *shape))
            for name, shape in self.piece.tokens.items()
        }
        for at, (seq, count) in enumerate(counts.items()):
            plan = plan_recurrent(
                self.spec,
                streams=[seq],
                step=count,
                standings=self.standings,
                start=self.start,
            )
            width = plan.state_write_src_idxs.shape[1]
            source[at] = at * steps + count - 1
            source[at, :width] = at * steps + plan.state_write_src_idxs[0]
            target[at, :width] = plan.state_write_dst_idxs[0]
            reads[at], sizes[at] = plan.state_read_idxs[0], count
            old = self.length(seq)
            for name, text in self.texts[seq].items():
                feeds[name][at, :count] = text[old : old + count]
        source[len(counts) :] = source[len(counts) - 1]
        fields = RecurrentFields(reads, source, target, sizes)._asdict()
        return {"tokens": np.zeros((streams, steps), np.int64), **fields, **feeds}

    def _noise(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        noise = self.noise.standard_normal(shape).astype(np.float32)
        return -5 * np.abs(noise) if name == "g" else noise


def delta_text(sizes: DeltaSizes, length: int, seed: int = 0) -> dict[str, Array]:
    """Random tokens of one sequence: rates and decays from 0 to almost everything."""
    rng = np.random.default_rng(seed)
    text = {
        name: rng.standard_normal((length, *shape))
        for name, shape in delta_tokens(sizes).items()
    }
    for name in ("q", "k"):
        text[name] /= np.linalg.norm(text[name], axis=-1, keepdims=True)
    text["beta"] = 1 / (1 + np.exp(-3 * text["beta"]))
    text["g"] = -np.exp(2 * text["g"])
    return {name: value.astype(np.float32) for name, value in text.items()}


def delta_twin(sizes: DeltaSizes, text: Feeds) -> tuple[Array, Array]:
    """The recurrence, token by token: outputs [n, Hv, dv] and states after 0 to n tokens."""
    q, k, v, beta, g = (text[name].astype(float) for name in DeltaTokens._fields)
    times = sizes.value_heads // sizes.key_heads
    q, k = np.repeat(q, times, axis=1), np.repeat(k, times, axis=1)
    states = [np.zeros((sizes.value_heads, sizes.key_dim, sizes.value_dim))]
    outputs = []
    for token in range(len(q)):
        state = states[-1] * np.exp(g[token])[:, None, None]
        seen = np.einsum("hkv,hk->hv", state, k[token])
        delta = beta[token][:, None] * (v[token] - seen)
        states.append(state + k[token][:, :, None] * delta[:, None, :])
        outputs.append(np.einsum("hkv,hk->hv", states[-1], q[token]))
    return np.array(outputs), np.array(states)


def conv_twin(sizes: ConvSizes, weight: Array, x: Array, *, silu: bool) -> Array:
    """Outputs [n, C], tap by tap; nothing stands before the first token."""
    y = np.zeros(x.shape)
    for token in range(len(x)):
        for tap in range(sizes.kernel):
            back = token - (sizes.kernel - 1 - tap) * sizes.dilation
            if back >= 0:
                y[token] += weight[:, 0, tap].astype(float) * x[back]
    return y / (1 + np.exp(-y)) if silu else y
