"""Measured steps as columns of numbers, which cost little to store and to compute with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cospec.core.stats import StepStats
from cospec.policies.latency.forward import Floats


class StepColumns(NamedTuple):
    """Each ``[S]``, by step, as in ``StepStats``; seconds are without scoring.

    Attributes:
        drafts: sequences with a draft; all sequences where the step does not say.
        draft: seconds of drafting.
        target: seconds of verification.
        working: seconds after planning.
        fed: tokens of new texts that the drafter read.
        members: drafters of a pool that drafted.
        scoring: seconds of scoring known tokens; scores of a new text are part of feeding.
        alone: 1 or 0, see ``StepStats.alone``.
    """

    context: Floats
    tokens: Floats
    sequences: Floats
    depth: Floats
    proposed: Floats
    drafts: Floats
    draft: Floats
    target: Floats
    working: Floats
    fed: Floats
    members: Floats
    scoring: Floats
    alone: Floats


class StepStore:
    """Stores steps, the oldest first."""

    def __init__(self) -> None:
        self._values: list[float] = []  # one step after the other, each in the order of ``StepColumns``

        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, stats: StepStats, fed: int, members: int) -> int:
        """Store a step; returns the number of stored steps."""
        times, sequences = stats.times, stats.sequences
        scoring = 0.0 if fed else times.scoring
        self._values += (
            stats.context_tokens, stats.batched_tokens, sequences, stats.depth, stats.proposed,
            stats.drafts or sequences, times.draft - scoring, times.target, stats.total - stats.planning - scoring,
            fed, members, scoring, stats.alone,
        )  # fmt: skip
        self._count += 1
        return self._count

    def take(self) -> StepColumns:
        """Return all steps, and clear the store."""
        values, self._values, self._count = np.fromiter(self._values, np.float64, len(self._values)), [], 0
        return StepColumns(*values.reshape(-1, len(StepColumns._fields)).T.copy())
