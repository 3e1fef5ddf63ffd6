"""Which sequences take part in a step, where a smaller step commits more tokens per second (SmartSpec Algorithm 2).

Sequences stand in the order of their latest turn, new sequences last. A step takes a prefix of the order. A sequence
that waits moves ahead of all that took part (ageing). So with b of n sequences in a step, none waits longer than n / b
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from cospec.core.types import DraftBudget
from cospec.policies.goodput.length_optimizer import LengthChoice

PARTS = 8  # sizes of a prefix that are examined: eighths of the sequences
GAIN = 1.02  # of the goodput of all sequences, that a smaller step must reach
SKIP_STEP = DraftBudget(skip_step=True)

Solved = Callable[[Sequence[int]], tuple[LengthChoice, list[DraftBudget]]]
"""The best lengths of a step with the sequences of these indices."""


def batch_sizes(count: int, every: bool = False) -> list[int]:
    """Return the sizes to examine, all of ``count`` sequences first."""
    sizes = range(1, count + 1) if every else {-(-count * part // PARTS) for part in range(1, PARTS + 1)}
    return sorted(sizes, reverse=True)


def best_size(
    sizes: Sequence[int], limit: float, outcome: Callable[[int], LengthChoice], latest: int | None = None
) -> int:
    """Return the size with the most tokens per second, among the sizes whose step ends within ``limit`` seconds.

    Args:
        sizes: as of ``batch_sizes``.
        outcome: the best lengths of the first so many sequences.
        latest: the size to start from. Smaller or larger sizes are examined while goodput rises: goodput has one peak
            where no token costs less than the token before. None examines all sizes.

    Without such a size, return the size with the shortest of the examined steps.
    """
    values: dict[int, float] = {}

    def value(size: int) -> float:
        if size not in values:
            found = outcome(size)
            values[size] = found.goodput if found.seconds <= limit else -found.seconds
        return values[size]

    if latest is None:
        best = max(sizes, key=value)
    else:
        start = min(range(len(sizes)), key=lambda place: abs(sizes[place] - latest))
        smaller = _climb(sizes[start:], value)
        best = smaller if smaller != sizes[start] else _climb(sizes[start::-1], value)
    whole = value(sizes[0])
    return sizes[0] if 0 < value(best) <= GAIN * whole else best


def _climb(sizes: Sequence[int], value: Callable[[int], float]) -> int:
    """Return the size before the first size that is no better."""
    for size, following in pairwise(sizes):
        if value(following) <= value(size):
            return size
    return sizes[-1]


def in_turns(order: Sequence[int], size: int, solved: Solved) -> tuple[LengthChoice, list[DraftBudget]]:
    """Return the lengths of all sequences, in the order of their ages, where each step takes ``size`` of them.

    Args:
        order: the indices of the sequences in the order of turns.

    The last group of turns has ``size`` sequences too, some of them from the group before.
    """
    counts, tokens, seconds = np.zeros(len(order), np.int64), 0.0, 0.0
    budgets = [DraftBudget()] * len(order)
    for start in range(0, len(order), size):
        group = order[min(start, len(order) - size) :][:size]
        choice, chosen = solved(group)
        tokens, seconds = tokens + choice.tokens, seconds + choice.seconds
        for place, count, budget in zip(group, choice.counts.tolist(), chosen, strict=True):
            counts[place], budgets[place] = count, budget
    return LengthChoice(counts, tokens, seconds), budgets


class SequenceSelection:
    """Turns of the sequences while ``size`` of them take part in a step; None: all take part.

    Args:
        limit: longest step in seconds.
        every: examine every size, as an oracle does.
    """

    def __init__(self, limit: float = float("inf"), every: bool = False) -> None:
        self.size: int | None = None
        self._limit, self._every = limit, every
        self._ids: Sequence[str] = ()
        self._order: list[int] = []  # indices among these; the turns begin at ``_start`` and go round
        self._start = 0
        self._budgets: list[DraftBudget] = []
        self._steps: dict[int, list[DraftBudget]] = {}  # of these budgets, by ``_start``

    def choose(
        self, ids: Sequence[str], choice: LengthChoice, budgets: list[DraftBudget], solved: Solved
    ) -> tuple[LengthChoice, list[DraftBudget]]:
        """Choose ``size`` (SmartSpec Algorithm 2); return the lengths in steps of so many sequences.

        Args:
            choice, budgets: the best lengths of a step with all sequences.
        """
        order, count = self.order(ids), len(ids)
        latest = None if self._every else min(self.size or count, count)

        firsts = {count: (choice, budgets)}

        def first(group: Sequence[int]) -> tuple[LengthChoice, list[DraftBudget]]:
            return firsts[len(group)] if group[0] == order[0] else solved(group)

        def outcome(size: int) -> LengthChoice:
            firsts[size] = firsts.get(size) or solved(order[:size])
            return firsts[size][0]

        size = best_size(batch_sizes(count, self._every), self._limit, outcome, latest)
        self.size = size if size < count else None
        return firsts[count] if self.size is None else in_turns(order, size, first)

    def turns(self, count: int) -> float:
        """Return the steps in which each of ``count`` sequences takes part once, in the mean."""
        return 1.0 if self.size is None else max(1.0, count / self.size)

    def order(self, ids: Sequence[str]) -> list[int]:
        """Return the indices of ``ids``, oldest first, in the order of turns."""
        before, self._start, self._steps = self._order[self._start :] + self._order[: self._start], 0, {}
        if ids is not self._ids and ids != self._ids:
            places = {id: place for place, id in enumerate(ids)}
            before = [places.pop(id) for id in (self._ids[place] for place in before) if id in places]
            before += places.values()
        self._ids, self._order = ids, before
        return before

    def taken(self, ids: Sequence[str], budgets: list[DraftBudget]) -> list[DraftBudget]:
        """Return the budgets of one step, in a list that stays unchanged; the sequences beyond the size wait."""
        count, size = len(ids), self.size
        if size is None or size >= count:
            self._ids, self._order, self._start = (), [], 0
            return budgets
        if ids is not self._ids and ids != self._ids:
            self.order(ids)
        if budgets is not self._budgets:
            self._budgets, self._steps = budgets, {}
        start = self._start
        self._start = (start + size) % count
        found = self._steps.get(start)
        if found is None:
            found = self._steps[start] = [SKIP_STEP] * count
            for place in (self._order[start:] + self._order[:start])[:size]:
                found[place] = budgets[place]
        return found
