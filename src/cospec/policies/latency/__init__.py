"""The time model: of a forward pass, of a step, and its online fit."""
