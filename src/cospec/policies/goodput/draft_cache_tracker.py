"""Whose drafts the drafter has a cache for, and who shall lose it (prefill disabling, SmartSpec section 5).

A sequence that is not drafted for is not fed to the drafter either; what it gains meanwhile has to be caught up with
once it is. Where most recent rounds left a sequence out, its draft cache is given back. It is not banned: when a draft
pays for the whole of its text again, it is drafted for again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cospec.core.types import Commit, DraftBudget, RequestState
from cospec.policies.goodput.length_optimizer import Floats, Ints

KEPT = 0.95  # weight of the past in the share of rounds without a draft, per round
BEARING = 64  # a cost that serves many rounds is charged to so many of them at most
PER_ROUND = 2.0  # tokens that a sequence with drafts is taken to gain in a round
ABSENT = 4096  # rounds after which a sequence that was not planned for is forgotten: nobody tells of aborted ones
USUAL = 16  # tokens behind that any drafted sequence may be; catching up with them is part of a step


@dataclass(slots=True)
class _Resident:
    fed: int = 0  # tokens in the drafter's cache
    idle: float = 0.0  # share of recent rounds without a draft
    drafted: bool = False
    round: int = 0


class DraftCacheTracker:
    """Follows the drafter's cache from outside."""

    def __init__(self, release_above: float) -> None:
        self._above = release_above
        self._all: dict[str, _Resident] = {}
        self._round = self._swept = 0

    @property
    def tracked(self) -> int:
        """Number of sequences of which something is kept."""
        return len(self._all)

    def tick(self, rounds: int = 1) -> None:
        """So many rounds went by with the latest budgets."""
        self._round += rounds

    def backlog(self, sequences: Sequence[RequestState], lengths: Sequence[int]) -> Floats:
        """``[n]``: tokens to feed before each can be drafted for, as far as this round should bear them."""
        behind = self.behind(sequences).tolist()
        return np.array([_owed(*each) for each in zip(sequences, lengths, behind, strict=True)])

    def to_begin(self, sequences: Sequence[RequestState]) -> float:
        """The same for one that comes anew, if it is like these."""
        prompts = (len(sequence.request.prompt) for sequence in sequences)
        return float(np.mean([_owed(s, n, n) for s, n in zip(sequences, prompts, strict=True)]))

    def behind(self, sequences: Sequence[RequestState]) -> Ints:
        """``[n]``: tokens of each that the drafter has not been fed."""
        fed = (self._all[s.request.id].fed if s.request.id in self._all else 0 for s in sequences)
        return np.array([len(s.tokens) - n for s, n in zip(sequences, fed, strict=True)], dtype=np.int64)

    def settle(self, ids: Sequence[str], budgets: Sequence[DraftBudget], lengths: Sequence[int]) -> list[DraftBudget]:
        """Note what is drafted from now on; budgets of those that lose their cache say so."""
        found = list(budgets)
        for place, id in enumerate(ids):
            one = self._all.get(id)
            if one is None:
                one = self._all[id] = _Resident(round=self._round)
            weight = KEPT ** (self._round - one.round)
            one.idle = one.idle * weight + (0.0 if one.drafted else 1.0 - weight)
            one.round, one.drafted = self._round, found[place].depth > 0
            if not one.drafted and one.fed and one.idle > self._above:
                one.fed = 0
                found[place] = replace(found[place], release=True)
        if self._round - self._swept >= ABSENT:
            self._swept = self._round
            self._all = {id: one for id, one in self._all.items() if self._round - one.round < ABSENT}
        return found

    def observe(self, commits: Sequence[Commit]) -> int:
        """Note what a round fed to the drafter; the tokens of those sequences that got many."""
        many = 0
        for commit in commits:
            one = self._all.get(commit.id)
            if one is not None:
                if commit.drafted:
                    behind = commit.base_len - one.fed
                    many += behind if behind > USUAL else 0
                    one.fed = commit.base_len + len(commit.path)
                if commit.finish is not None:
                    del self._all[commit.id]
        return many


def _owed(sequence: RequestState, length: int, behind: int) -> float:
    if behind <= USUAL:
        return 0.0
    most = sequence.request.sampling.max_tokens
    left = math.inf if most is None else most - length + len(sequence.request.prompt)
    return behind / max(1.0, min(BEARING, left / PER_ROUND))
