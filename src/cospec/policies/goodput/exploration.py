"""Looking again at what is not done: sequences that are not drafted for, draft lengths that are not in use.

A rate that is not observed is not known: text grows easy, drafters learn, and a sequence may be unlike the others. So a
small share of the time goes into drafts that are not expected to pay. What a probe loses is set against that allowance,
so that many sequences are looked at where that is cheap and few, or none for long, where it is dear. In the same way a
few rounds without drafts, or with drafts one token shorter or longer, are run now and then: what these take is not
known from rounds of the present length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cospec.policies.goodput.length_optimizer import Floats, Ints, LengthChoice, StepLimits

LENGTH = 2
ROUNDS = 3  # of a probe: what is fed for it should tell something
MOST = 4  # sequences at a time: what they tell of everybody grows with them no more than what they cost
EVERY = 64  # rounds between two looks
LONG = 1024  # rounds with drafts alone, or with none, after which nobody can say what the other kind takes
OTHER = 128  # rounds between two looks at other lengths, at least
CLOSE = 1.35  # times as many tokens per second as another length brings, up to which what that one takes can decide
IN_A_ROW = 8  # rounds of a look: the first one takes longer, as the caches hold what the other length left there
PLAIN = "plain"  # the name of rounds without drafts among the other lengths


class ExplorationBudget:
    """The allowance, and whose turn it is."""

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
        """Whether it is time to see if a probe can be afforded."""
        return self._rounds >= EVERY

    @property
    def forgotten(self) -> bool:
        """Whether nothing was drafted for so long that a probe is worth what it costs at most, whatever is expected."""
        return self._undrafted >= LONG

    def accrue(self, seconds: float, drafted: bool) -> None:
        """A round took so long, with or without drafts."""
        self._undrafted = 0 if drafted else self._undrafted + 1
        self._seconds = min(self._seconds + self._share * seconds, 512 * self._share * seconds)
        self._rounds += 1
        self._since_plain += 1
        self._since_other += 1

    @property
    def other_due(self) -> bool:
        """Whether it is time to look at another length."""
        return self._since_other >= OTHER

    def other(self, best: LengthChoice, others: Mapping[str, LengthChoice]) -> str | None:
        """Which of the other lengths is to be run for some rounds, by name, although ``best`` should bring more.

        Lengths take turns. One that is far from the best, or too dear for the allowance, is left out; but rounds
        without drafts, ``PLAIN``, are run once in ``LONG`` rounds whatever they lose.
        """
        names = sorted(others)
        start = names.index(self._latest) + 1 if self._latest in names else 0
        for name in names[start:] + names[:start]:
            lost = IN_A_ROW * max(0.0, others[name].seconds - others[name].tokens / best.goodput)
            near = best.goodput <= CLOSE * others[name].goodput and lost <= self._seconds
            if near or (name == PLAIN and self._since_plain >= LONG):
                self._seconds -= lost
                self._latest, self._since_other = name, 0
                if name == PLAIN:
                    self._since_plain = 0
                return name
        return None

    def choose(self, idle: Ints, costs: Floats, given: StepLimits, drafted: int, rate: float) -> Sequence[int]:
        """Who of the ``idle`` is drafted for in the next ``EXECUTION_MODES``, as many as the allowance covers.

        Args:
            idle: ``[m]``, sequences without a draft that an optimist would draft for.
            costs: ``[m]``, seconds of drafting ``LENGTH`` tokens for each in ``EXECUTION_MODES`` rounds, feeding
                included.
            drafted: draft tokens that the round has without probes.
            rate: acceptance that is expected of them.
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
        spent = np.cumsum(costs[order]) + ROUNDS * (verify + levels)
        plain = (given.seconds + float(given.verified[0])) / given.tokens  # what a token takes without drafts
        lost = np.maximum(spent - ROUNDS * counts * (rate + rate * rate) * plain, 0.0)
        affordable = int((lost <= self._seconds).sum())
        if not affordable:
            return []
        self._seconds -= float(lost[affordable - 1])
        chosen = idle[order[:affordable]]
        self._turn = int(chosen[-1]) + 1
        found: list[int] = chosen.tolist()
        return found
