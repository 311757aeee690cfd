"""Weights: read from checkpoints, turned into the bundle's forms, written as one file."""
