"""Acceptance methods in tensor operations, on the device of the logits, with the draws of ``core.rng``."""
