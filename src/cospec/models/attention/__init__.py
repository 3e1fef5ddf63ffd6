"""Attention back ends."""
