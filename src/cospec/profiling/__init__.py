"""Measures the latency of forward passes and drafts on this machine, and stores the fits."""
