"""How a model becomes graphs. Never imports the runtime or onnxruntime."""

from cachegraph.graphgen.export import export, export_preset
from cachegraph.graphgen.static import StaticSize, freeze_bundle
from cachegraph.models.export_options import ExportOptions

__all__ = ["ExportOptions", "StaticSize", "export", "export_preset", "freeze_bundle"]
