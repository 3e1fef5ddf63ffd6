"""Contrastive decoding: subtract a weak model's logits (CoS eq. 5; Li et al. 2023, 2210.15097)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from cospec.core.sampling import log_softmax
from cospec.ensemble.blends.weighted import native_combine, native_reads
from cospec.errors import InvalidInput, words
from cospec.native.library import PLAIN, NativeBlend
from cospec.plugin_options import Options


class ContrastiveOptions(Options):
    """Options of ``contrastive``.

    Attributes:
        mu: the factor of the weak model's logits, which are subtracted.
        plausibility: excludes tokens below this share of the strong model's top probability; 0 keeps all tokens.
    """

    mu: float = Field(default=0.1, ge=0, le=10, allow_inf_nan=False)
    plausibility: float = Field(default=0.0, ge=0, le=1)


class Contrastive:
    """``softmax(l_0 - mu l_1)``: the first model is the strong one."""

    Options: ClassVar[type[ContrastiveOptions]] = ContrastiveOptions
    exact = True

    def __init__(self, mu: float = 0.1, plausibility: float = 0.0) -> None:
        more = f", plausibility={plausibility:g}" if plausibility else ""
        self.name = f"contrastive(mu={mu:g}{more})"
        self.members = (0, 1) if mu else (0,)
        self._mu, self._plausibility = mu, plausibility
        least = math.log(plausibility) if plausibility else -math.inf
        plain = not mu and not plausibility
        self.recipe = PLAIN if plain else NativeBlend("linear", (1.0, -mu)[: len(self.members)], least)

    @classmethod
    def build(cls, options: ContrastiveOptions, count: int) -> Contrastive:
        """Build the blend; raises ``InvalidInput`` unless there are two models."""
        if count != 2:
            raise InvalidInput(
                "ensemble.method", words(f"contrastive with {count} models"), "contrastive with two models"
            )
        return cls(options.mu, options.plausibility)

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Return log-probabilities ``[R, V]`` in double precision; excluded tokens are minus infinity."""
        if not self._mu and not self._plausibility:
            return logits[0]
        if native_reads(logits):
            return native_combine(logits, self.recipe)
        strong = logits[0].double()
        result = strong - self._mu * logits[1].double() if len(logits) > 1 else strong.clone()
        if self._plausibility:
            least = strong.amax(-1, keepdim=True) + self.recipe.plausibility_cutoff
            result.masked_fill_(strong < least, -torch.inf)
        return log_softmax(result)
