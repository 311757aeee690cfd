"""Qwen4-Exp: config, presets, tensors, contract."""
