"""Long-rope models: one set of frequencies for all sequences.

transformers takes the long factors for a whole batch as soon as one sequence exceeds the original length. Results would
then depend on the batch. Here the longest sequence decides once: beyond the original length, which the user requests
with ``max_model_len``, all sequences have the long factors.
"""

from __future__ import annotations

from typing import Any


def original_length(config: Any) -> int | None:
    """Return the length up to which the short factors hold; None without long-rope frequencies.

    Args:
        config: of the text model.
    """
    lengths = [rope.get("original_max_position_embeddings") for rope in _long_ropes(config)]
    return int(lengths[0] or config.max_position_embeddings) if lengths else None


def fix_frequencies(config: Any, max_model_len: int | None) -> Any:
    """Change a model's configuration to the long factors, if its longest sequence exceeds the original length."""
    text = config.get_text_config()
    original = original_length(text)
    if original is not None and max_model_len is not None and max_model_len > original:
        for rope in _long_ropes(text):
            rope["short_factor"] = rope["long_factor"]
    return config


def _long_ropes(config: Any) -> list[dict[str, Any]]:
    """Return the long-rope parameters of the model, or of each kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    every = (given, *given.values())
    return [rope for rope in every if isinstance(rope, dict) and rope.get("rope_type") == "longrope"]
