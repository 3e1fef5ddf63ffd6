"""Benchmarks: the same prompts, the same clock and the same token counts for every measured system."""
