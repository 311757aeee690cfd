"""How a model becomes graphs. Never imports the runtime or onnxruntime."""

from cachegraph.graphgen.export import export, export_preset
from cachegraph.graphgen.options import ExportOptions
from cachegraph.graphgen.static import StaticSize, freeze_bundle

__all__ = ["ExportOptions", "StaticSize", "export", "export_preset", "freeze_bundle"]
