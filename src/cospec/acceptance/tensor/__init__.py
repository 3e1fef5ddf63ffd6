"""Acceptance methods in tensor operations, on the device of the logits, with the draws of ``rng.random_streams``."""
