"""How graphs run. Never imports graphgen, onnx, onnxscript, torch or transformers."""
