"""How a model becomes graphs. Never imports the runtime or onnxruntime."""
