"""Timing rounds that run as one call, as an engine whose models are native runs them.

Step by step such rounds take longer, most of that whatever is drafted: drafts would look cheaper than they are. Only
the target's room is reserved, as everywhere here; the drafter is fed, since it says where it goes on from.
"""

from __future__ import annotations

from collections.abc import Sequence

from cospec.core.interfaces import MultiStepRunner
from cospec.core.types import (
    DraftBudget,
    DraftContext,
    Request,
    RequestState,
    ScheduledRequest,
    SchedulerOutput,
)
from cospec.sampling_params import SamplingParams

ROUNDS = 8  # of one call; those behind the first find the caches as such rounds leave them
ENDLESS = 1 << 20


class MultiStepTimer:
    """Rounds of texts that are known already, one after the other and always from the same place."""

    def __init__(self, burst: MultiStepRunner) -> None:
        self._burst = burst
        self._sequences: dict[str, RequestState] = {}

    def play(self, contexts: Sequence[DraftContext], depth: int) -> list[tuple[float, float, float]]:
        """Tokens in the cache, seconds of drafting and of verifying, of each round; none where it has to be stepped."""
        sequences = [self._sequence(context) for context in contexts]
        budget = DraftBudget(depth, depth) if depth else DraftBudget()
        entries = tuple(ScheduledRequest(sequence, 1, budget) for sequence in sequences)
        if self._burst.supports(SchedulerOutput(0, entries, ROUNDS)):
            return []
        (outcomes, times), known = self._burst.run(entries, ROUNDS), sum(sequence.computed for sequence in sequences)
        found = []
        for place, (draft, target) in enumerate(times.each or ((times.draft, times.target),)):
            found.append((float(known), draft, target))
            for outcome in outcomes[place * len(entries) : (place + 1) * len(entries)]:
                known += 1 + (len(outcome.verdict.path) if outcome.verdict is not None else 0)
        return found[1:] or found

    def _sequence(self, context: DraftContext) -> RequestState:
        if context.id not in self._sequences:
            sampling = SamplingParams(temperature=0.0, max_tokens=ENDLESS, ignore_eos=True)
            request = Request(context.id, tuple(context.tokens), sampling, 0)
            self._sequences[context.id] = RequestState(request, list(context.tokens), len(context.tokens) - 1)
        return self._sequences[context.id]
