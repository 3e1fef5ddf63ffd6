"""Decoding-time realignment: linear in the logits (Liu et al. 2024, 2402.02992)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from cospec.core.sampling import log_softmax
from cospec.ensemble.blends.recipes import blended
from cospec.ensemble.blends.weights import WeightOptions, named
from cospec.native.library import PLAIN, NativeBlend

MOST = 100.0  # of a weight; beyond that the logits' own digits are all that decides


class Realign:
    """``softmax(sum_i w_i l_i)``: the models' distributions multiplied, each to the power of its weight.

    With an unaligned and an aligned model, ``lambda`` says how far to go from the first to the second; beyond 1 it goes
    further than the second, and below 0 away from it, so weights need only sum to 1.
    """

    Options: ClassVar[type[WeightOptions]] = WeightOptions

    def __init__(self, weights: Sequence[float]) -> None:
        self.name = named("realign", weights)
        self.members = tuple(member for member, weight in enumerate(weights) if weight)
        self._weights = tuple(weights[member] for member in self.members)
        self.recipe = PLAIN if self._weights == (1.0,) else NativeBlend("linear", self._weights)

    @classmethod
    def build(cls, options: WeightOptions, count: int) -> Realign:
        """For ``count`` models."""
        return cls(options.resolve(count, -MOST, MOST))

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Log-probabilities of ``sum_i w_i l_i``, ``[R, V]`` in double precision."""
        if self._weights == (1.0,):
            return logits[0]
        if (found := blended(logits, self.recipe)) is not None:
            return found
        total = self._weights[0] * logits[0].double()
        for weight, rows in zip(self._weights[1:], logits[1:], strict=True):
            total += weight * rows.double()
        return log_softmax(total)
