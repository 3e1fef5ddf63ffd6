"""Drafters on other machines: the protocol between the verifier and drafter nodes, and its two ends over ZeroMQ."""
