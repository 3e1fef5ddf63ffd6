"""The joint distribution of the first tokens of an output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TokenIds = tuple[int, ...]
BORDER = -1  # replaces any token whose logit is too close to the border of the top k


@dataclass(frozen=True, slots=True)
class Truncation:
    """The truncation of the sampled tokens.

    Attributes:
        length: tokens of an output.
        top_k: likeliest tokens at each position.
        tolerance: possible difference of a logit between two runs of a forward.
    """

    length: int
    top_k: int
    tolerance: float


@dataclass(slots=True)
class JointDistribution:
    """Outcomes and their probabilities.

    Attributes:
        masses: probability by outcome. An outcome has the distribution's length, or ends with ``BORDER``.
        border: by prefix, the tokens whose truncation is uncertain at the next position.
    """

    masses: dict[TokenIds, float] = field(default_factory=dict)
    border: dict[TokenIds, frozenset[int]] = field(default_factory=dict)

    def add(self, outcome: TokenIds, mass: float) -> None:
        """Add probability to ``outcome``."""
        self.masses[outcome] = self.masses.get(outcome, 0.0) + mass

    def outcome_of(self, tokens: TokenIds) -> TokenIds:
        """Return the outcome of sampled ``tokens``."""
        for place, token in enumerate(tokens):
            if token in self.border.get(tokens[:place], ()):
                return (*tokens[:place], BORDER)
        return tokens

    def likeliest(self, place: int, count: int) -> tuple[int, ...]:
        """Return the ``count`` likeliest tokens at ``place``, from 0, over all prefixes."""
        totals: Counter[int] = Counter()
        for outcome, mass in self.masses.items():
            if len(outcome) > place and outcome[place] != BORDER:
                totals[outcome[place]] += mass  # type: ignore[assignment]
        return tuple(token for token, _ in totals.most_common(count))

    def impossible(self, samples: Iterable[TokenIds]) -> set[TokenIds]:
        """Return the samples of probability 0 that the border does not explain."""
        return {tokens for tokens in samples if self.masses.get(self.outcome_of(tokens), 0.0) <= 0.0}


def joint_distribution(
    last_logits: Callable[[list[list[int]]], Tensor], prompt: Sequence[int], truncation: Truncation
) -> JointDistribution:
    """Compute the distribution of the first tokens after ``prompt`` at temperature 1.

    The engine adds in another order. So a token whose logit is within the tolerance of the top-k border may be kept or
    cut. All such tokens of a position are one outcome, which ends there.

    Args:
        last_logits: maps texts of one length to their last logits ``[texts, V]``.
    """
    going_on: dict[TokenIds, float] = {(): 1.0}
    found = JointDistribution()
    for _ in range(truncation.length):
        rows = last_logits([[*prompt, *prefix] for prefix in going_on]).double()
        longer: dict[TokenIds, float] = {}
        for (prefix, mass), row in zip(going_on.items(), rows, strict=True):
            best = row.topk(truncation.top_k)
            border = found.border[prefix] = _near_the_border(row, truncation)
            shares = torch.softmax(best.values, -1).tolist()
            for token, share in zip(best.indices.tolist(), shares, strict=True):
                if token in border:
                    found.add((*prefix, BORDER), mass * share)
                else:
                    longer[*prefix, token] = mass * share
        going_on = longer
    for outcome, mass in going_on.items():
        found.add(outcome, mass)
    return found


def _near_the_border(row: Tensor, truncation: Truncation) -> frozenset[int]:
    """Return the tokens whose distance to the border of the top k is below the tolerance."""
    inside, outside = row.topk(truncation.top_k + 1).values[-2:].tolist()
    near = (row > inside - truncation.tolerance) & (row < outside + truncation.tolerance)
    return frozenset(near.nonzero()[:, 0].tolist())
