"""How a model becomes graphs. Never imports the runtime or onnxruntime."""

from cachegraph.graphgen.export import export, export_preset
from cachegraph.graphgen.options import ExportOptions

__all__ = ["ExportOptions", "export", "export_preset"]
