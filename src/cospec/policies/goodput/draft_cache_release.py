"""Track which requests hold a draft KV cache, and release unused caches (SmartSpec section 5, prefill disabling).

A sequence without drafts is not fed to the drafter; a later draft must first feed the missed tokens. If most recent
steps left a sequence out, its draft cache is released. The sequence is drafted for again once a draft pays for its
whole text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cospec.core.types import Commit, DraftBudget, RequestState
from cospec.policies.goodput.length_optimizer import Floats, Ints

DECAY = 0.95  # weight of the past in the share of steps without a draft, per step
AMORTIZE_STEPS = 64  # maximum number of steps that share a one-time cost
TOKENS_PER_STEP = 2.0  # assumed tokens per step of a sequence with drafts
FORGET_AFTER = 4096  # steps after which an unplanned sequence is forgotten: aborted sequences are not reported
NORMAL_LAG = 16  # tokens that any drafted sequence may lag; feeding them is part of a step


@dataclass(slots=True)
class _CacheEntry:
    fed: int = 0  # tokens in the drafter's cache
    idle: float = 0.0  # share of recent steps without a draft
    drafted: bool = False
    step: int = 0


class DraftCacheRelease:
    """Models the content of the drafter's cache from plans and commits."""

    def __init__(self, release_above: float) -> None:
        self._above = release_above
        self._all: dict[str, _CacheEntry] = {}
        self._swept = 0  # step of the latest search for forgotten sequences

    @property
    def tracked(self) -> int:
        """Number of tracked sequences."""
        return len(self._all)

    def backlog(self, sequences: Sequence[RequestState], lengths: Sequence[int]) -> Floats | None:
        """Return the tokens to feed before each sequence can be drafted for, ``[n]``, as far as charged to this
        step; None if no sequence lags far."""
        unseen = self._unseen(sequences)
        if max(unseen, default=0) <= NORMAL_LAG:
            return None
        return np.array([_backlog(*each) for each in zip(sequences, lengths, unseen, strict=True)])

    def backlog_of_new_request(self, sequences: Sequence[RequestState]) -> float:
        """Return the same for a new sequence that resembles these."""
        prompts = (len(sequence.request.prompt) for sequence in sequences)
        return float(np.mean([_backlog(s, n, n) for s, n in zip(sequences, prompts, strict=True)]))

    def unseen(self, sequences: Sequence[RequestState]) -> Ints:
        """Return the tokens of each sequence that the drafter has not been fed, ``[n]``."""
        return np.array(self._unseen(sequences), dtype=np.int64)

    def _unseen(self, sequences: Sequence[RequestState]) -> list[int]:
        entries = [self._all.get(s.request.id) for s in sequences]
        return [len(s.tokens) - (0 if e is None else e.fed) for s, e in zip(sequences, entries, strict=True)]

    def settle(self, ids: Sequence[str], budgets: Sequence[DraftBudget], step: int) -> list[DraftBudget]:
        """Record the budgets from ``step`` on; budgets of evicted sequences have ``release`` set."""
        found = list(budgets)
        for place, id in enumerate(ids):
            entry = self._all.get(id)
            if entry is None:
                entry = self._all[id] = _CacheEntry(step=step)
            weight = DECAY ** (step - entry.step)
            entry.idle = entry.idle * weight + (0.0 if entry.drafted else 1.0 - weight)
            entry.step, entry.drafted = step, found[place].depth > 0
            if not entry.drafted and entry.fed and entry.idle > self._above:
                entry.fed = 0
                found[place] = replace(found[place], release=True)
        if step - self._swept >= FORGET_AFTER:
            self._swept = step
            self._all = {id: entry for id, entry in self._all.items() if step - entry.step < FORGET_AFTER}
        return found

    def observe(self, commits: Sequence[Commit]) -> int:
        """Record what a step fed to the drafter; returns the tokens of sequences that lagged far."""
        many = 0
        for commit in commits:
            if commit.drafted:
                entry = self._all.get(commit.id)
                if entry is not None:
                    unseen = commit.base_len - entry.fed
                    if unseen > NORMAL_LAG:
                        many += unseen
                    entry.fed = commit.base_len + len(commit.path)
            if commit.finish is not None:
                self._all.pop(commit.id, None)
        return many


def _backlog(sequence: RequestState, length: int, unseen: int) -> float:
    if unseen <= NORMAL_LAG:
        return 0.0
    most = sequence.request.sampling.max_tokens
    left = math.inf if most is None else most - length + len(sequence.request.prompt)
    return unseen / max(1.0, min(AMORTIZE_STEPS, left / TOKENS_PER_STEP))
