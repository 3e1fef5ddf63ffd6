"""Time models of a forward pass and of a step, and their online fit."""
