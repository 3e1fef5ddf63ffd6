"""A mixture of the models' probabilities (CoS eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cospec.core.sampling import softmax
from cospec.ensemble.blends.recipes import native_combine, native_reads
from cospec.ensemble.blends.weights import WeightOptions, display_name
from cospec.native.library import PLAIN, NativeBlend


class Weighted:
    """``sum_i lambda_i p_i``. A model of weight 0 is no member, so it never runs.

    The distributions are mixed at temperature 1. The request's parameters then apply to the logarithm of the mixture,
    as
    they apply to one model's logits. At temperature 0 the mixture's most likely token is taken. At temperature 1
    without
    penalties or truncation, a proposal of model i is accepted with probability ``lambda_i`` or more (CoS theorem 3.2).
    """

    Options: ClassVar[type[WeightOptions]] = WeightOptions

    def __init__(self, weights: Sequence[float]) -> None:
        self.name = display_name("weighted", weights)
        self.members = tuple(member for member, weight in enumerate(weights) if weight > 0)
        self._weights = tuple(weights[member] for member in self.members)
        self.recipe = NativeBlend("mixture", self._weights) if len(self.members) > 1 else PLAIN

    @classmethod
    def build(cls, options: WeightOptions, count: int) -> Weighted:
        """Build the blend of ``count`` models; raises ``InvalidInput`` for unsuitable weights."""
        return cls(options.resolve(count, 0, 1))

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Return ``log sum_i lambda_i softmax(l_i)``, ``[R, V]`` in double precision.

        A row is NaN if any model's logits of this row are not numbers.
        """
        if len(self.members) == 1:
            return logits[0]
        if native_reads(logits):
            return native_combine(logits, self.recipe)
        ones = [1.0] * len(logits[0])
        mixed = sum(weight * softmax(rows, ones) for weight, rows in zip(self._weights, logits, strict=True))
        with np.errstate(divide="ignore"):
            result = torch.from_numpy(np.log(mixed))
        broken = torch.stack([~torch.isfinite(rows.amax(-1)) for rows in logits]).any(0)
        result[broken.to(result.device)] = torch.nan
        return result.to(logits[0].device)
