"""The DeepSeek-V4 text model as onnxscript modules."""
