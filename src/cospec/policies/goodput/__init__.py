"""Speculation lengths by goodput (SmartSpec)."""
