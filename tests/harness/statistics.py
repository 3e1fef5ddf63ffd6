"""Goodness of fit of sampled outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import chi2, chisquare

from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import OutputDistribution
from harness.reference import next_distribution


def fit(outcomes: Iterable[Any], distribution: Mapping[Any, float]) -> float:
    """The chi-square p-value of ``outcomes`` under ``distribution``; 0 when one of them is impossible."""
    counts = Counter(outcomes)
    if any(outcome not in distribution for outcome in counts):
        return 0.0
    total = sum(counts.values())
    return float(
        chisquare([counts[key] for key in distribution], [mass * total for mass in distribution.values()]).pvalue
    )


def coarse_fit(outcomes: Iterable[object], distribution: OutputDistribution, least: float = 5.0) -> float:
    """The same where most outcomes are rare: those expected fewer than ``least`` times are one cell."""
    listed = list(outcomes)
    often = {outcome for outcome, mass in distribution.items() if mass * len(listed) >= least}
    if any(outcome not in distribution for outcome in listed):
        return 0.0
    cells = {outcome: distribution[outcome] for outcome in often}
    cells["rest"] = 1.0 - sum(cells.values())
    return fit((outcome if outcome in often else "rest" for outcome in listed), cells)


def transition_fit(
    model: ToyModel, params: SamplingParams, prompt: Sequence[int], outputs: Iterable[Sequence[int]]
) -> float:
    """The p-value of every next token given the tokens before it, over whole outputs of a Markov model.

    One long output says as much as many short ones, and draws that are tied together over rounds show.
    """
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for output in outputs:
        tokens = [*prompt, *output]
        for place in range(len(prompt), len(tokens)):
            counts.setdefault(tuple(tokens[place - model.order : place]), Counter())[tokens[place]] += 1
    statistic, freedom = 0.0, 0
    for context, seen in counts.items():
        p = np.array(next_distribution(model.logits(context).tolist(), params, (), ()))
        found = np.array([seen[token] for token in range(model.vocab_size)])
        if found[p == 0].any():
            return 0.0
        wanted = p[p > 0] * found.sum()
        statistic += float(((found[p > 0] - wanted) ** 2 / wanted).sum())
        freedom += len(wanted) - 1
    return float(chi2.sf(statistic, freedom))
