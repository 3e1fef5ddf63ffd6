"""Formats of weights in memory: one file per format."""
