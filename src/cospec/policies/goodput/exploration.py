"""Exploration: probe drafts for sequences without drafts, and trials of draft lengths that are not in use.

A rate without observations is unknown: texts become easier, drafters learn, and sequences differ. A small share of the
time therefore goes into drafts that are not expected to pay. The expected loss of a probe is charged to this
allowance, so cheap probes cover many sequences and expensive probes cover few or wait. In the same way a few steps now
and then run without drafts, or with drafts one token shorter or longer. Steps of the current length do not reveal the
times of these steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cospec.core.stats import StepStats
from cospec.policies.goodput.length_optimizer import Floats, Ints, LengthChoice, StepLimits

LENGTH = 2
PROBE_STEPS = 3  # steps of a probe: enough to justify feeding the drafter
MOST = 4  # sequences per probe: more cost more, but reveal little more about all sequences
EVERY = 64  # steps between two probes
LONG = 1024  # steps with drafts only, or without any, after which the time of the other kind is unknown
OTHER = 128  # minimum steps between two trials of other lengths
CLOSE = 1.35  # a trial needs a length whose predicted goodput is at most this factor below the best
TRIAL_STEPS = 8  # steps of a trial: the first is slower, because the caches still hold the other length's data
PLAIN = "undrafted"  # name of steps without drafts among the other lengths


class ExplorationBudget:
    """The allowance for exploration, and the sequence or length whose turn it is."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds = 0.0
        self._rounds = self._undrafted = 0
        self._since_other = 0
        self._since_plain = LONG - OTHER
        self._latest = ""
        self._turn = 0

    @property
    def due(self) -> bool:
        """Whether to check if a probe is affordable."""
        return self._rounds >= EVERY

    @property
    def stale(self) -> bool:
        """Whether drafting stopped so long ago that a probe is worth its maximum cost."""
        return self._undrafted >= LONG

    def accrue(self, steps: Sequence[StepStats]) -> None:
        """Record steps, with or without drafts."""
        undrafted, seconds = self._undrafted, self._seconds
        for stats in steps:
            undrafted = 0 if stats.depth > 0 else undrafted + 1
            earned = self._share * stats.total
            seconds = min(seconds + earned, 512 * earned)
        self._undrafted, self._seconds = undrafted, seconds
        self._rounds += len(steps)
        self._since_plain += len(steps)
        self._since_other += len(steps)

    @property
    def trial_due(self) -> bool:
        """Whether to try another length."""
        return self._since_other >= OTHER

    def other(self, best: LengthChoice, others: Mapping[str, LengthChoice]) -> str | None:
        """Return the name of the length to try next, although ``best`` is expected to be better; None for no trial.

        Lengths take turns. A length far from the best, or beyond the allowance, is skipped. Steps without drafts,
        ``PLAIN``, run once in ``LONG`` steps regardless of their loss.
        """
        names = sorted(others)
        start = names.index(self._latest) + 1 if self._latest in names else 0
        for name in names[start:] + names[:start]:
            lost = TRIAL_STEPS * max(0.0, others[name].seconds - others[name].tokens / best.goodput)
            near = best.goodput <= CLOSE * others[name].goodput and lost <= self._seconds
            if near or (name == PLAIN and self._since_plain >= LONG):
                self._seconds -= lost
                self._latest, self._since_other = name, 0
                if name == PLAIN:
                    self._since_plain = 0
                return name
        return None

    def choose(self, idle: Ints, costs: Floats, given: StepLimits, drafted: int, rate: float) -> Sequence[int]:
        """Return the indices of the idle sequences to draft for in the next ``PROBE_STEPS`` steps.

        As many as the allowance covers.

        Args:
            idle: ``[m]``, indices of sequences without a draft that an optimistic rate would draft for.
            costs: ``[m]``, seconds of drafting ``LENGTH`` tokens for each in ``PROBE_STEPS`` steps, feeding included.
            drafted: draft tokens in the step without probes.
            rate: expected acceptance rate of the probes.
        """
        self._rounds = 0
        start = int(np.searchsorted(idle, self._turn)) % len(idle)
        order = np.roll(np.arange(len(idle)), -start)
        most = (len(given.verified) - 1 - drafted) // LENGTH
        counts = np.arange(1, min(len(idle), most, MOST) + 1)
        if not len(counts):
            return []
        order = order[: len(counts)]
        verify = given.verified[drafted + LENGTH * counts] - given.verified[drafted]
        levels = given.levels[min(LENGTH, len(given.levels) - 1)] if not drafted else 0.0
        spent = np.cumsum(costs[order]) + PROBE_STEPS * (verify + levels)
        undrafted = (given.seconds + float(given.verified[0])) / given.tokens  # seconds per token without drafts
        lost = np.maximum(spent - PROBE_STEPS * counts * (rate + rate * rate) * undrafted, 0.0)
        affordable = int((lost <= self._seconds).sum())
        if not affordable:
            return []
        self._seconds -= float(lost[affordable - 1])
        chosen = idle[order[:affordable]]
        self._turn = int(chosen[-1]) + 1
        found: list[int] = chosen.tolist()
        return found
