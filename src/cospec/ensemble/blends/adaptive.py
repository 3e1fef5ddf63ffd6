"""The target's distribution, moved towards the drafter's at unimportant tokens (DSD eq. 7 and 8, corrected)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from cospec.ensemble.blends.weighted import native_combine, native_reads
from cospec.errors import InvalidInput, words
from cospec.native.library import PLAIN, NativeBlend
from cospec.plugin_options import Options
from cospec.rng.random_streams import Floats

SEARCH_STEPS = 6  # most exponents that are tried; without success a row stays the target's
SHORTFALL = 0.95  # the next exponent aims at this share of the bound


class AdaptiveOptions(Options):
    """The bound, and the conditions of a key token; key tokens keep the target's own weight.

    Attributes:
        max_divergence: at no position is the distribution further from the target's, in total variation.
        lambda1: all tokens of a position are key where the drafter's entropy exceeds the target's this many times.
        lambda2: a token is key where the two probabilities differ by more than this.
        lambda3: all tokens of a position are key where the two distributions overlap by less than this.
    """

    max_divergence: float = Field(default=0.1, ge=0, le=1)
    lambda1: float = Field(default=2.0, ge=0)
    lambda2: float = Field(default=0.3, ge=0, le=1)
    lambda3: float = Field(default=0.3, ge=0, le=1)


class Adaptive:
    """``norm(P_t^(1 - tau(x)) P_d^tau(x))`` with ``tau(x)`` 0 on key tokens and ``tau`` elsewhere.

    ``tau`` follows from the bound, for each position on its own. It starts at 1. Where the total variation from the
    target exceeds the bound, ``tau`` shrinks in proportion to the excess. A bound in place of a fixed ``tau`` says what
    a user wants to know: how far the outputs may depart from the target's, before temperature and truncation.

    Every token of the vocabulary is tested. The blend therefore depends on the position alone, not on the draft there.
    The first model is the target, the second the drafter.
    """

    Options: ClassVar[type[AdaptiveOptions]] = AdaptiveOptions

    def __init__(self, options: AdaptiveOptions) -> None:
        bound = options.max_divergence
        self.name = f"adaptive(max_divergence={bound:g})"
        self.exact = not bound
        self.members = (0, 1) if bound else (0,)
        weights = bound, options.lambda1, options.lambda2, options.lambda3, float(SEARCH_STEPS), SHORTFALL
        self.recipe = NativeBlend("adaptive", weights) if bound else PLAIN
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
        if native_reads(logits):
            return native_combine(logits, self.recipe)
        target, drafter = (torch.log_softmax(rows.double(), -1) for rows in logits)
        pairs = zip(target.cpu().numpy(), drafter.cpu().numpy(), strict=True)
        found = np.stack([self._relaxed(*pair) for pair in pairs])
        return torch.from_numpy(found).to(target.device)

    def _relaxed(self, target: Floats, drafter: Floats) -> Floats:
        """Return one row of the blend, from two rows of log-probabilities ``[V]``."""
        p = np.exp(target)
        if np.isnan(p).any() or np.isnan(drafter).any():
            return np.full_like(target, np.nan)
        tilt, bound, tau = self._tilt(target, drafter), self._options.max_divergence, 1.0
        for _ in range(SEARCH_STEPS):
            row = target + tau * tilt
            top = row.max()
            row -= top + np.log(np.exp(row - top).sum())
            distance = 0.5 * np.abs(np.exp(row) - p).sum()
            if distance <= bound:
                return row
            tau *= SHORTFALL * bound / distance
        return target

    def _tilt(self, target: Floats, drafter: Floats) -> Floats:
        """Return log P_d - log P_t of a row, ``[V]``, and 0 for DSD's Key(x)."""
        options, t, d = self._options, np.exp(target), np.exp(drafter)
        high_entropy = _entropy(d, drafter) > options.lambda1 * _entropy(t, target)
        low_overlap = np.minimum(t, d).sum() < options.lambda3
        key = (np.abs(t - d) > options.lambda2) | np.isneginf(target) | high_entropy | low_overlap
        return np.where(key, 0.0, drafter - np.where(key, 0.0, target))


def _entropy(p: Floats, log_p: Floats) -> float:
    """Return the entropy of a row in nats."""
    return float(-(p * np.where(p > 0, log_p, 0.0)).sum())
