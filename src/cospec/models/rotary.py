"""Frequencies of rotary embeddings (RoFormer, 2104.09864), also for contexts longer than those of training.

The results have the bits of transformers' results, and need no import of it. Dynamic frequencies change beyond the
positions of the model, which bound its sequences; `long_rope` chooses those of a long-rope model at load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def frequencies(rope: Mapping[str, Any], rotated: int, positions: int) -> tuple[Tensor, float]:
    """Return frequencies ``[R / 2]`` in radians per position, and the scale of cosines and sines.

    Args:
        rope: a model's parameters, of one of ``ROPE_TYPES``.
        rotated: R, the numbers of a head that rotate.
        positions: of the model.
    """
    kind, base = rope.get("rope_type", "default"), rope["rope_theta"]
    factor: Any = rope.get("factor")
    if kind == "dynamic":
        base = base * (factor * positions / positions - (factor - 1)) ** (rotated / (rotated - 2))
    wavelengths = base ** (torch.arange(0, rotated, 2, dtype=torch.float) / rotated)  # over 2 pi
    if kind == "llama3":
        return _llama3(1.0 / wavelengths, rope), 1.0
    if kind not in ("yarn", "longrope"):
        return 1.0 / wavelengths / (factor if kind == "linear" else 1.0), 1.0
    original = rope["original_max_position_embeddings"]
    factor = positions / original if factor is None else factor
    if kind == "yarn":
        found, scale = _yarn(wavelengths, rope, factor, rotated), _yarn_scale(rope, factor)
    else:
        found = 1.0 / (torch.tensor(rope["short_factor"], dtype=torch.float32) * wavelengths)
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    given = rope.get("attention_factor")
    return found, scale if given is None else float(given)


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Divide low frequencies by the factor, and some of those between low and high ones (Llama 3.1)."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original, lengths = rope["original_max_position_embeddings"], 2 * math.pi / plain
    found = torch.where(lengths > original / low, plain / factor, plain)
    share = (original / lengths - low) / (high - low)
    between = ~(lengths < original / high) & ~(lengths > original / low)
    return torch.where(between, (1 - share) * found / factor + share * found, found)


def _yarn(wavelengths: Tensor, rope: Mapping[str, Any], factor: float, rotated: int) -> Tensor:
    """Divide the frequencies that turn less than once in the original length, and some up to 32 turns (2309.00071)."""
    original, base = rope["original_max_position_embeddings"], rope["rope_theta"]

    def place(turns: float) -> float:
        """Return the place of the frequency with so many turns."""
        return rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    last += 0.001 if first == last else 0.0
    kept = 1 - ((torch.arange(rotated // 2, dtype=torch.float) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    """Return the scale of cosines and sines of YaRN, section 3.4, with DeepSeek's two multipliers."""

    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, every = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(one) / scale(every) if one and every else scale(1)
