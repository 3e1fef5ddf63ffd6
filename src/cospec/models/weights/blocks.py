"""Weights of integers in blocks along the inputs, in the byte layouts of GGUF files.

The only part of a weight are its file blocks, ``uint8 [outputs, bytes of a row]``. The native library packs the blocks
and never expands them. Inputs that do not fill the last block of a row are padded with zeros.

Products round their inputs to 8 bits per row and 32 inputs (``round_inputs``). Sums of integers are exact, and the
steps in float32 have one order. So the native product has the same bits for every number of rows and threads, and for
every instruction set (``csrc/ops/block_kernel.h``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cospec.errors import InvalidInput, words
from cospec.models.weights.format import StoredWeight, WeightFormat

INPUT_BLOCK, LARGEST_INPUT = 32, 127
SMALLEST = 1e-30  # of the largest input of a block; smaller inputs are 0

Blocks = NDArray[np.uint8]
"""File blocks ``[blocks, bytes of a block]``."""
Floats = NDArray[np.float32]


class BlockFormat(WeightFormat):
    """A format of blocks. A model in the format is another model with another distribution.

    Attributes:
        block_bytes: bytes of a block in a file.
    """

    devices = ("cpu",)
    rounds_inputs = True
    block_bytes: ClassVar[int]

    @abstractmethod
    def quantize(self, values: Floats) -> Blocks:
        """Return the file blocks of ``[blocks, block_size]`` float32 values. Zeros give a block of zeros' value."""

    @abstractmethod
    def dequantize(self, blocks: Blocks) -> Floats:
        """Return the exact values ``[blocks, block_size]`` of file blocks."""

    def from_blocks(self, blocks: Tensor | Blocks, inputs: int, order: Tensor | None = None) -> StoredWeight:
        """Take the rows of a file without a copy.

        Args:
            blocks: uint8 ``[outputs, bytes of a row]``.
            order: see ``StoredWeight``.

        Raises:
            InvalidInput: the bytes of a row are not those of ``inputs`` weights.
        """
        part = torch.from_numpy(blocks) if isinstance(blocks, np.ndarray) else blocks
        expected = self.num_bytes(1, inputs)
        if part.dtype is not torch.uint8 or part.dim() != 2 or part.shape[1] != expected:
            given = words(f"{part.dtype} of shape {tuple(part.shape)}")
            raise InvalidInput(f"blocks of {self.name}", given, f"uint8 [out, {expected}] for {inputs} inputs")
        return StoredWeight(self, (part,), inputs, order)

    def encode(self, weight: Tensor) -> tuple[Tensor, ...]:
        """See ``WeightFormat``; the part is the file blocks."""
        padded = F.pad(weight.cpu().float(), (0, -weight.shape[1] % self.block_size))
        blocks = self.quantize(padded.reshape(-1, self.block_size).numpy())
        return (torch.from_numpy(blocks.reshape(len(weight), -1)),)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """See ``WeightFormat``; the padding is part of the value."""
        blocks = parts[0].numpy()
        values = self.dequantize(blocks.reshape(-1, self.block_bytes))
        return torch.from_numpy(values.reshape(len(blocks), -1)).to(dtype)

    def pack(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See ``WeightFormat``."""
        return tuple(parts)

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """See ``WeightFormat``."""
        return outputs * -(-inputs // self.block_size) * self.block_bytes

    def round_inputs(self, x: Tensor) -> Tensor:
        """See ``WeightFormat``: a scale per row and 32 inputs, integers from -127 to 127, ties to even."""
        blocks = F.pad(x.float(), (0, -x.shape[-1] % INPUT_BLOCK)).unflatten(-1, (-1, INPUT_BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True)
        factor = torch.where(largest >= SMALLEST, LARGEST_INPUT / largest, 0.0)
        scale = torch.where(largest >= SMALLEST, largest / LARGEST_INPUT, 0.0)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        rounded: Tensor = ((blocks * factor).round() * scale).flatten(-2)[..., : x.shape[-1]]
        return rounded.to(x.dtype)


def halves(column: Blocks) -> Floats:
    """Return ``[n, 1]`` float32 of two bytes ``[n, 2]`` each."""
    return np.ascontiguousarray(column).view(np.float16).astype(np.float32)


def half_bytes(scale: Floats) -> Blocks:
    """Return the two bytes of each float16 of ``[n, 1]``."""
    return scale.astype(np.float16).view(np.uint8)


def inverse(scale: Floats) -> Floats:
    """Return ``1 / scale``, and 0 for 0."""
    return np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)


def split_nibbles(packed: Blocks) -> Blocks:
    """Return the lower halves of all bytes, then the upper halves: ``[n, b]`` to ``[n, 2 b]``."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], 1)


def join_nibbles(integers: Blocks) -> Blocks:
    """The reverse of ``split_nibbles``."""
    half = integers.shape[1] // 2
    return integers[:, :half] | integers[:, half:] << np.uint8(4)


def largest_signed(values: Floats) -> Floats:
    """Return the value of the largest magnitude of each block, with its sign: ``[n, b]`` to ``[n, 1]``."""
    found: Floats = np.take_along_axis(values, np.abs(values).argmax(1)[:, None], 1)
    return found


def split_fifth_bits(packed: Blocks) -> Blocks:
    """Return 32 integers of 5 bits: four bytes of fifth bits precede the bytes of ``split_nibbles``."""
    fifth = np.unpackbits(packed[:, :4], axis=1, bitorder="little")
    return split_nibbles(packed[:, 4:]) | fifth << np.uint8(4)


def join_fifth_bits(integers: Blocks) -> Blocks:
    """The reverse of ``split_fifth_bits``."""
    fifth = np.packbits(integers >> np.uint8(4), axis=1, bitorder="little")
    return np.concatenate([fifth, join_nibbles(integers & np.uint8(15))], 1)


def range_integers(values: Floats, largest: int) -> tuple[Blocks, Floats, Floats]:
    """Return integers from 0 to ``largest``, and scale and minimum ``[n, 1]`` of each block's range."""
    minimum = values.min(1, keepdims=True)
    scale = (values.max(1, keepdims=True) - minimum) / np.float32(largest)
    integers = np.clip(np.trunc((values - minimum) * inverse(scale) + 0.5), 0, largest).astype(np.uint8)
    return integers, scale, minimum
