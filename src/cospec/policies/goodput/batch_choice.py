"""Which sequences take part in a step, where a smaller step commits more tokens per second (SmartSpec Algorithm 2).

Sequences stand in the order of their latest turn, new sequences last. A step takes a prefix of the order. A sequence
that waits moves ahead of all that took part (ageing). So with b of n sequences in a step, none waits longer than n / b
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cospec.core.types import DraftBudget
from cospec.policies.goodput.length_optimizer import LengthChoice

PARTS = 8  # sizes of a prefix that are examined: eighths of the sequences
GAIN = 1.02  # of the goodput of all sequences, that a smaller step must reach
WAIT = DraftBudget(wait=True)


def batch_sizes(count: int, every: bool = False) -> list[int]:
    """Return the sizes to examine, all of ``count`` sequences first."""
    sizes = range(1, count + 1) if every else {-(-count * part // PARTS) for part in range(1, PARTS + 1)}
    return sorted(sizes, reverse=True)


def best_size(sizes: Sequence[int], limit: float, outcome: Callable[[int], LengthChoice]) -> int:
    """Return the size with the most tokens per second, among the sizes whose step ends within ``limit`` seconds.

    Args:
        sizes: as of ``batch_sizes``.
        outcome: the best lengths of the first so many sequences.

    Without such a size, return the smallest.
    """
    found = {size: outcome(size) for size in sizes}
    within = [size for size in sizes if found[size].seconds <= limit]
    if not within:
        return min(sizes)
    first = within[0]
    best = max(within, key=lambda size: found[size].goodput)
    return best if found[best].goodput > GAIN * found[first].goodput else first


def in_turns(
    order: Sequence[int], size: int, solved: Callable[[Sequence[int]], tuple[LengthChoice, list[DraftBudget]]]
) -> tuple[LengthChoice, list[DraftBudget]]:
    """Return the lengths of all sequences, in the order of their ages, where each step takes ``size`` of them.

    Args:
        order: the indices of the sequences in the order of turns.
        solved: the best lengths of a step with the sequences of these indices.

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


class BatchChoice:
    """Turns of the sequences while ``size`` of them take part in a step; None: all take part."""

    def __init__(self) -> None:
        self.size: int | None = None
        self._turns = 0
        self._latest: dict[str, int] = {}  # the latest turn of each sequence; a new sequence comes after all turns

    def order(self, ids: Sequence[str]) -> list[int]:
        """Return the indices of ``ids``, oldest first, in the order of turns."""
        return sorted(range(len(ids)), key=lambda place: self._latest.get(ids[place], self._turns))

    def taken(self, ids: Sequence[str], budgets: list[DraftBudget]) -> list[DraftBudget]:
        """Return the budgets of one step; the sequences beyond the size wait."""
        if self.size is None or self.size >= len(ids):
            self._latest.clear()
            return budgets
        order = self.order(ids)
        waiting = order[self.size :]
        found, latest = list(budgets), {ids[place]: self._latest.get(ids[place], self._turns) for place in waiting}
        for place in order[: self.size]:
            self._turns += 1
            latest[ids[place]] = self._turns
        for place in waiting:
            found[place] = WAIT
        self._latest = latest
        return found
