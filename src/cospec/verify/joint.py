"""The joint distribution of the first tokens of an output, and how well a sample fits (chi-square)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Words = tuple[int, ...]
BORDER = -1  # in the place of a token: any token so near to the border of the top k that it may be in or out
LEAST = 5.0  # expected outcomes per cell, below which they are counted together


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens are sampled.

    Attributes:
        length: tokens of an output.
        top_k: likeliest tokens at each place.
        tolerance: what two runs of a forward may differ by in a logit.
    """

    length: int
    top_k: int
    tolerance: float


@dataclass(slots=True)
class JointDistribution:
    """Outcomes and their probabilities.

    Attributes:
        masses: by outcome. An outcome is as long as the distribution, or ends with ``BORDER``.
        border: by prefix, the tokens that may be in or out at the next place.
    """

    masses: dict[Words, float] = field(default_factory=dict)
    border: dict[Words, frozenset[int]] = field(default_factory=dict)

    def add(self, outcome: Words, mass: float) -> None:
        """Give ``outcome`` more probability."""
        self.masses[outcome] = self.masses.get(outcome, 0.0) + mass

    def outcome_of(self, tokens: Words) -> Words:
        """The outcome that sampled ``tokens`` count as."""
        for place, token in enumerate(tokens):
            if token in self.border.get(tokens[:place], ()):
                return (*tokens[:place], BORDER)
        return tokens

    def likeliest(self, place: int, count: int) -> tuple[int, ...]:
        """The ``count`` likeliest tokens at ``place``, counted from 0, whatever stands before."""
        totals: Counter[int] = Counter()
        for outcome, mass in self.masses.items():
            if len(outcome) > place and outcome[place] != BORDER:
                totals[outcome[place]] += mass  # type: ignore[assignment]
        return tuple(token for token, _ in totals.most_common(count))

    def impossible(self, samples: Iterable[Words]) -> set[Words]:
        """The samples that have no probability and are not explained by the border either."""
        return {tokens for tokens in samples if self.masses.get(self.outcome_of(tokens), 0.0) <= 0.0}

    def p_value(self, samples: Iterable[Words]) -> float:
        """Of the chi-square test; rare outcomes are one cell, and an impossible sample gives 0."""
        listed = list(samples)
        if self.impossible(listed):
            return 0.0
        counts, n = Counter(map(self.outcome_of, listed)), len(listed)
        often = [outcome for outcome, mass in self.masses.items() if mass * n >= LEAST]
        expected = [self.masses[outcome] * n for outcome in often]
        observed = [float(counts[outcome]) for outcome in often]
        if n - sum(expected) > 1e-9 * n:
            expected.append(n - sum(expected))
            observed.append(n - sum(observed))
        if len(expected) < 2:
            return 1.0
        statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
        degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
        return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


def joint_distribution(
    last_logits: Callable[[list[list[int]]], Tensor], prompt: Sequence[int], truncation: Truncation
) -> JointDistribution:
    """The distribution of the first tokens behind ``prompt`` at temperature 1.

    A token whose logit is nearer than the tolerance to the border of the top k may be in or out: the engine adds in
    another order. All such tokens of a place are one outcome, which ends there.

    Args:
        last_logits: from texts of one length to their last logits ``[texts, V]``.
    """
    going_on: dict[Words, float] = {(): 1.0}
    found = JointDistribution()
    for _ in range(truncation.length):
        rows = last_logits([[*prompt, *prefix] for prefix in going_on]).double()
        longer: dict[Words, float] = {}
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
    """Tokens that are in the top k, or out, by less than the tolerance."""
    inside, outside = row.topk(truncation.top_k + 1).values[-2:].tolist()
    near = (row > inside - truncation.tolerance) & (row < outside + truncation.tolerance)
    return frozenset(near.nonzero()[:, 0].tolist())
