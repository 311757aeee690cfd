"""Qwen4-Exp: config, tensor table, cache layouts, contract and the float64 twin."""
