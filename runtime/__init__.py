"""How graphs run. Never imports graphgen, onnx, onnxscript, torch or transformers."""

from cachegraph.runtime.batch import Batch
from cachegraph.runtime.continuation import DraftCount, Event, GenerateOptions
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.sampling import Choice, SamplingOptions

__all__ = [
    "Batch",
    "Choice",
    "DraftCount",
    "Engine",
    "Event",
    "GenerateOptions",
    "SamplingOptions",
]
