"""Counters and gauges of an engine."""
