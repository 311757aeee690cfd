"""How graphs run. Never imports graphgen, onnx, onnxscript, torch or transformers."""

from cachegraph.runtime.batch import Batch
from cachegraph.runtime.engine import Engine
from cachegraph.runtime.generate import Event, GenerateOptions
from cachegraph.runtime.sampling import Choice, SamplingOptions

__all__ = ["Batch", "Choice", "Engine", "Event", "GenerateOptions", "SamplingOptions"]
