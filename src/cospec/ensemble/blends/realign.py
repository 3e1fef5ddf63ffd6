"""Decoding-time realignment: linear in the logits (Liu et al. 2024, 2402.02992)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from cospec.core.sampling import log_softmax
from cospec.ensemble.blends.recipes import native_combine, native_reads
from cospec.ensemble.blends.weights import WeightOptions, display_name
from cospec.native.library import PLAIN, NativeBlend

MAX_WEIGHT = 100.0  # beyond this weight, rounding errors of the logits decide


class Realign:
    """``softmax(sum_i w_i l_i)``: the product of the models' distributions, each to the power of its weight.

    With an unaligned and an aligned model, ``lambda`` interpolates from the first to the second. A ``lambda`` above 1
    or
    below 0 extrapolates, so the weights only need to sum to 1.
    """

    Options: ClassVar[type[WeightOptions]] = WeightOptions

    def __init__(self, weights: Sequence[float]) -> None:
        self.name = display_name("realign", weights)
        self.members = tuple(member for member, weight in enumerate(weights) if weight)
        self._weights = tuple(weights[member] for member in self.members)
        self.recipe = PLAIN if self._weights == (1.0,) else NativeBlend("linear", self._weights)

    @classmethod
    def build(cls, options: WeightOptions, count: int) -> Realign:
        """Build the blend of ``count`` models; raises ``InvalidInput`` for unsuitable weights."""
        return cls(options.resolve(count, -MAX_WEIGHT, MAX_WEIGHT))

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Return log-probabilities of ``softmax(sum_i w_i l_i)``, ``[R, V]`` in double precision."""
        if self._weights == (1.0,):
            return logits[0]
        if native_reads(logits):
            return native_combine(logits, self.recipe)
        total = self._weights[0] * logits[0].double()
        for weight, rows in zip(self._weights[1:], logits[1:], strict=True):
            total += weight * rows.double()
        return log_softmax(total)
