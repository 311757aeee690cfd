"""Measured figures: models to measure, peers to compare with, tables to write down."""
