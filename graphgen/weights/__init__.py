"""Weights: published files in (`reader`), one tensor at a time; recipes and one bundle file out."""
