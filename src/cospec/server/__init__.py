"""The OpenAI-compatible HTTP face of the engine."""
