"""The target's distribution, bent towards the drafter's where that matters little (DSD eq. 7 and 8, corrected)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from cospec.errors import InvalidInput, words
from cospec.native.library import PLAIN
from cospec.options import Options


class AdaptiveOptions(Options):
    """What makes a token a key token, which keeps the target's own distribution.

    Attributes:
        tau: how far other tokens are bent towards the drafter.
        lambda1: all tokens of a position are key where the drafter's entropy is more than this times the target's.
        lambda2: a token is key where the two probabilities differ by more than this.
        lambda3: all tokens of a position are key where the two distributions overlap by less than this.
    """

    tau: float = Field(default=0.2, ge=0, le=1)
    lambda1: float = Field(default=2.0, ge=0)
    lambda2: float = Field(default=0.3, ge=0, le=1)
    lambda3: float = Field(default=0.3, ge=0, le=1)


class Adaptive:
    """``norm(P_t^(1 - tau(x)) P_d^tau(x))`` with ``tau(x)`` 0 on key tokens and ``tau`` elsewhere.

    The key test is made for every token of the vocabulary, so that the law is a function of the position alone and not
    of what was drafted there. The first model is the target, the second the drafter.
    """

    Options: ClassVar[type[AdaptiveOptions]] = AdaptiveOptions

    def __init__(self, options: AdaptiveOptions) -> None:
        self.name = f"adaptive(tau={options.tau:g})"
        self.members = (0, 1) if options.tau else (0,)
        self.recipe = None if options.tau else PLAIN
        self._options = options

    @classmethod
    def build(cls, options: AdaptiveOptions, count: int) -> Adaptive:
        """Raises ``InvalidInput`` unless there are two models."""
        if count != 2:
            raise InvalidInput("ensemble.method", words(f"adaptive with {count} models"), "adaptive with two models")
        return cls(options)

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Log-probabilities ``[R, V]`` in double precision."""
        if len(self.members) == 1:
            return logits[0]
        target, drafter = (torch.log_softmax(rows.double(), -1) for rows in logits)
        tau = self._options.tau
        bent = (1 - tau) * target + tau * drafter
        return torch.log_softmax(torch.where(self._key(target, drafter), target, bent), -1)

    def _key(self, target: Tensor, drafter: Tensor) -> Tensor:
        """``[R, V]``; DSD's Key(x). Sums are numpy's, whose result for a row does not depend on the number of rows."""
        t, d = (rows.exp().cpu().numpy() for rows in (target, drafter))
        options = self._options
        strange = _entropy(d) > options.lambda1 * _entropy(t)
        apart = np.minimum(t, d).sum(-1) < options.lambda3
        keys = (np.abs(t - d) > options.lambda2) | (strange | apart)[:, None]
        return torch.from_numpy(keys).to(target.device)


def _entropy(p: np.ndarray) -> np.ndarray:
    """``[R]`` in nats."""
    logs = np.log(np.where(p > 0, p, 1.0))
    return np.asarray(-(p * logs).sum(-1))
