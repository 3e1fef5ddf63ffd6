"""Losslessness shown on the user's own models and machine: one rung of the ladder a file."""
