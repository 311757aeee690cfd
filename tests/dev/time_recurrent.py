"""Times one recurrent layer's state work, cache in place, and the operators not used for it.

Run by hand: PYTHONPATH=tests python tests/dev/time_recurrent.py. Each figure is the least processor
time of many runs on one thread, which other work on the machine disturbs least; the nodes that a
step shares between its layers are in each. Figures: docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import thread_time

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from support.recurrent_layers import Array, Piece, conv_piece, delta_piece, delta_text

from cachegraph.graphgen.layers.causal_conv import ConvSizes
from cachegraph.graphgen.layers.gated_delta import ChunkedDelta, DeltaSizes, FusedDelta

SIZES = {
    "release": DeltaSizes(key_heads=16, value_heads=48, key_dim=128, value_dim=128),
    "small": DeltaSizes(key_heads=2, value_heads=4, key_dim=16, value_dim=16),
}
# Tokens of the step and states kept.
STEPS = (1, 1), (4, 1), (4, 4), (16, 1), (16, 9), (64, 1), (64, 9), (128, 1), (128, 9)
LONG_STEPS = (256, 1), (512, 1)


def main() -> None:
    """Print every table."""
    for name, sizes in SIZES.items():
        time_rule(name, sizes)
    for dilation in (1, 3):
        time_conv(ConvSizes(channels=10240, kernel=4, dilation=dilation))
    time_norm()


def time_rule(name: str, sizes: DeltaSizes) -> None:
    """Both lowerings of the gated delta rule."""
    rules = {
        "chunked, steps to 64": ChunkedDelta(sizes, 64),
        "chunked, steps to 128": ChunkedDelta(sizes, 128),
        "chunked, steps to 512": ChunkedDelta(sizes, 512),
        "fused": FusedDelta(sizes),
    }
    for title, rule in rules.items():
        piece = delta_piece(rule)
        print(f"{name}, {title}: {len(piece.model.graph.node)} nodes")
        longest = getattr(rule, "max_step", 512)
        for steps, kept in (*STEPS, *LONG_STEPS):
            if steps > longest or (kept > 1 and isinstance(rule, FusedDelta)):
                continue
            feeds = plan_feeds(steps, kept) | {
                key: value[None] for key, value in delta_text(sizes, steps).items()
            }
            print(f"  {steps:4} tokens, {kept} kept: {in_place(piece, feeds):.3f} ms")


def time_conv(sizes: ConvSizes) -> None:
    """The convolution with its history kept, and ONNX Runtime's operator alone."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((sizes.channels, 1, sizes.kernel)).astype(np.float32)
    piece = conv_piece(sizes, weight, silu=True)
    node = helper.make_node(
        "CausalConvWithState",
        ["x", "w", "", "h"],
        ["y", "new"],
        domain="com.microsoft",
        dilation=sizes.dilation,
        channels_last=1,
        activation="silu",
    )
    history = np.zeros((1, sizes.history, sizes.channels), np.float32)
    for steps in (1, 16, 128):
        x = rng.standard_normal((1, steps, sizes.channels)).astype(np.float32)
        ours = in_place(piece, plan_feeds(steps, 1) | {"x": x})
        theirs = single(node, {"x": x, "w": weight, "h": history})
        text = f"convolution, dilation {sizes.dilation}, {steps} tokens"
        print(f"{text}: {ours:.3f} ms; one node {theirs:.3f} ms")


def time_norm() -> None:
    """ONNX Runtime's gated norm, 48 heads of 128, and the plain nodes that it would replace."""
    rng = np.random.default_rng(0)
    node = helper.make_node(
        "GatedRMSNorm",
        ["x", "w", "g"],
        ["y"],
        domain="com.microsoft",
        activation="sigmoid",
    )
    weight = np.ones(128, np.float32)
    for steps in (1, 16, 128):
        x = rng.standard_normal((1, steps, 48, 128)).astype(np.float32)
        fused = single(node, {"x": x, "w": weight, "g": x})
        plain = timed(session(plain_norm()), {"x": x, "w": weight, "g": x})
        print(
            f"gated norm, {steps} tokens: plain nodes {plain:.3f} ms; one node {fused:.3f} ms"
        )


def plain_norm() -> onnx.ModelProto:
    """The nodes that layers/gated_norm.py leaves after ONNX Runtime's fusions."""
    nodes = [
        helper.make_node(
            "SimplifiedLayerNormalization", ["x", "w"], ["n"], axis=-1, epsilon=1e-6
        ),
        helper.make_node("Sigmoid", ["g"], ["s"]),
        helper.make_node("Mul", ["n", "s"], ["y"]),
    ]
    return graph_of(nodes, {"x": 4, "w": 1, "g": 4}, ["y"])


def plan_feeds(steps: int, kept: int) -> dict[str, Array]:
    """The plan of one sequence that keeps its last states in rows of its own."""
    return {
        "tokens": np.zeros((1, steps), np.int64),
        "state_read_idxs": np.zeros(1, np.int64),
        "state_write_src_idxs": np.arange(steps - kept, steps)[None],
        "state_write_dst_idxs": np.arange(kept)[None],
        "n_tokens": np.array([steps]),
    }


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session as the engine opens it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.enable_mem_pattern = False
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def in_place(piece: Piece, feeds: Mapping[str, Array]) -> float:
    """Milliseconds of a call whose cache is one buffer, in and out."""
    opened = session(piece.model)
    binding = opened.io_binding()
    cache = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((10, piece.width), np.float32))
    names = {value.name for value in opened.get_inputs()}
    for name in names - {"cache"}:
        binding.bind_cpu_input(name, np.ascontiguousarray(feeds[name]))
    binding.bind_ortvalue_input("cache", cache)
    binding.bind_ortvalue_output("cache.out", cache)
    binding.bind_output("out")
    return best(lambda: opened.run_with_iobinding(binding))


def single(node: onnx.NodeProto, feeds: Mapping[str, Array]) -> float:
    """Milliseconds of a graph of one node."""
    ranks = {name: value.ndim for name, value in feeds.items()}
    return timed(session(graph_of([node], ranks, list(node.output))), feeds)


def graph_of(
    nodes: Sequence[onnx.NodeProto], ranks: Mapping[str, int], outputs: Sequence[str]
) -> onnx.ModelProto:
    """A graph of f32 inputs of these ranks."""
    graph = helper.make_graph(
        list(nodes),
        "nodes",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank)
            for name, rank in ranks.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def timed(opened: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> float:
    """Milliseconds of a run."""
    return best(lambda: opened.run(None, dict(feeds)))


def best(call: Callable[[], object]) -> float:
    """The least time of repeated calls: ten at least, and a second of them or 300."""
    times: list[float] = []
    while len(times) < 10 or (sum(times) < 1 and len(times) < 300):
        start = thread_time()
        call()
        times.append(thread_time() - start)
    return min(times) * 1e3


if __name__ == "__main__":
    main()
