"""Planners: pure functions from cell table and ubatch to logical index lists, exactly sized.

Own the meaning of every index; padding to a bucket is `runtime/padding.py`.
"""
