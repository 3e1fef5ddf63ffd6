"""The target's distribution, moved towards the drafter's at unimportant tokens (DSD eq. 7 and 8, corrected)."""

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
    """Conditions of a key token; key tokens keep the target's own distribution.

    Attributes:
        tau: how far other tokens move towards the drafter.
        lambda1: all tokens of a position are key where the drafter's entropy exceeds the target's this many times.
        lambda2: a token is key where the two probabilities differ by more than this.
        lambda3: all tokens of a position are key where the two distributions overlap by less than this.
    """

    tau: float = Field(default=0.2, ge=0, le=1)
    lambda1: float = Field(default=2.0, ge=0)
    lambda2: float = Field(default=0.3, ge=0, le=1)
    lambda3: float = Field(default=0.3, ge=0, le=1)


class Adaptive:
    """``norm(P_t^(1 - tau(x)) P_d^tau(x))`` with ``tau(x)`` 0 on key tokens and ``tau`` elsewhere.

    Every token of the vocabulary is tested. The blend therefore depends on the position alone, not on the draft there.
    The first model is the target, the second the drafter.
    """

    Options: ClassVar[type[AdaptiveOptions]] = AdaptiveOptions

    def __init__(self, options: AdaptiveOptions) -> None:
        self.name = f"adaptive(tau={options.tau:g})"
        self.exact = not options.tau
        self.members = (0, 1) if options.tau else (0,)
        self.recipe = None if options.tau else PLAIN
        self._options = options

    @classmethod
    def build(cls, options: AdaptiveOptions, count: int) -> Adaptive:
        """Build the blend; raises ``InvalidInput`` unless there are two models."""
        if count != 2:
            raise InvalidInput("ensemble.method", words(f"adaptive with {count} models"), "adaptive with two models")
        return cls(options)

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Return log-probabilities ``[R, V]`` in double precision."""
        if len(self.members) == 1:
            return logits[0]
        target, drafter = (torch.log_softmax(rows.double(), -1) for rows in logits)
        tau = self._options.tau
        shifted = (1 - tau) * target + tau * drafter
        return torch.log_softmax(torch.where(self._key(target, drafter), target, shifted), -1)

    def _key(self, target: Tensor, drafter: Tensor) -> Tensor:
        """Return DSD's Key(x), ``[R, V]`` booleans.

        numpy sums a row independently of the number of rows; torch does not.
        """
        t, d = (rows.exp().cpu().numpy() for rows in (target, drafter))
        options = self._options
        high_entropy = _entropy(d) > options.lambda1 * _entropy(t)
        low_overlap = np.minimum(t, d).sum(-1) < options.lambda3
        keys = (np.abs(t - d) > options.lambda2) | (high_entropy | low_overlap)[:, None]
        return torch.from_numpy(keys).to(target.device)


def _entropy(p: np.ndarray) -> np.ndarray:
    """Return the entropy of each row, ``[R]``, in nats."""
    logs = np.log(np.where(p > 0, p, 1.0))
    return np.asarray(-(p * logs).sum(-1))
