"""Qwen4-Exp as a graph."""
