"""Writes blocks of types that the package ``gguf`` reads and does not write."""

from __future__ import annotations

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize as gguf_quantize
from numpy.typing import NDArray

from cospec.models.weights.blocks import Blocks, Floats, half_bytes, halves, inverse, largest_signed
from cospec.models.weights.iq4_nl import Iq4Nl
from cospec.models.weights.q6_k import Q6K

PAIRS = np.array([0, 2, 4, 6], np.uint8)  # places of four integers of two bits in a byte
SUPER_BLOCK = 256


def quantize(values: Floats, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Return the blocks ``[..., bytes of a row]`` of values ``[..., in]``."""
    own = {"Q3_K": q3_k, "Q6_K": Q6K().quantize, "IQ4_XS": iq4_xs}.get(kind.name)
    if own is None:
        found: NDArray[np.uint8] = gguf_quantize(values, kind)
        return found
    return own(values.reshape(-1, SUPER_BLOCK)).reshape(*values.shape[:-1], -1)


def q3_k(values: Floats) -> Blocks:
    """Return blocks ``[n, 110]`` of ``[n, 256]``; the largest weight of 16 is -4 times their scale."""
    parts = values.reshape(-1, 16, 16)
    factor, sub, step = _scales(parts, -4)
    integers = np.clip(np.rint(parts * inverse(step)) + 4, 0, 7).astype(np.uint8).reshape(-1, 2, 4, 32)
    third = integers.reshape(-1, 8, 32) >> np.uint8(2)
    mask = np.bitwise_or.reduce(third << np.arange(8, dtype=np.uint8)[:, None], 1)
    low = np.bitwise_or.reduce((integers & np.uint8(3)) << PAIRS[:, None], 2).reshape(-1, 64)
    high = np.bitwise_or.reduce((sub >> np.uint8(4)).reshape(-1, 4, 4) << PAIRS[:, None], 1)
    nibbles = sub & np.uint8(15)
    return np.concatenate([mask, low, nibbles[:, :8] | nibbles[:, 8:] << np.uint8(4), high, factor], 1)


def iq4_xs(values: Floats) -> Blocks:
    """Return blocks ``[n, 136]`` of ``[n, 256]``; the largest weight of 32 is -127 times their scale."""
    parts = values.reshape(-1, 8, 32)
    factor, sub, step = _scales(parts, -127)
    nearest = np.abs((parts * inverse(step))[..., None] - Iq4Nl.values).argmin(-1).astype(np.uint8)
    packed = (nearest[..., :16] | nearest[..., 16:] << np.uint8(4)).reshape(len(values), -1)
    high = np.bitwise_or.reduce((sub >> np.uint8(4)).reshape(-1, 2, 4) << PAIRS, 2)
    nibbles = sub & np.uint8(15)
    return np.concatenate([factor, high, nibbles[:, ::2] | nibbles[:, 1::2] << np.uint8(4), packed], 1)


def _scales(parts: Floats, largest: int) -> tuple[Blocks, Blocks, Floats]:
    """Return bytes of a float16 factor ``[n, 2]``, sub-scales plus 32 ``[n, parts]``, and steps ``[n, parts, 1]``.

    Args:
        largest: integer of the largest weight of a part.
    """
    scale = largest_signed(parts.reshape(-1, parts.shape[2])).reshape(parts.shape[:2]) / np.float32(largest)
    factor = half_bytes(largest_signed(scale) * np.float32(-1 / 32))
    sub = np.clip(np.rint(scale * inverse(halves(factor))) + 32, 0, 63)
    return factor, sub.astype(np.uint8), (halves(factor) * (sub - 32).astype(np.float32))[..., None]
