"""Times steps that run as one native call, as in an engine with native models.

Single steps take longer, mostly independent of the drafts, so drafts would look too cheap. Only the target's pages are
reserved; the drafter reads the texts, because its state is the starting point.
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
    Speculation,
)
from cospec.sampling_params import SamplingParams

ROUNDS = 8  # steps per call; the steps after the first have realistic processor caches
ENDLESS = 1 << 20


class MultiStepTimer:
    """Steps on known texts, always from the same position."""

    def __init__(self, runner: MultiStepRunner) -> None:
        self._runner = runner
        self._sequences: dict[str, RequestState] = {}

    def time_steps(self, contexts: Sequence[DraftContext], depth: int) -> list[tuple[float, float, float]]:
        """Return cached tokens, drafting and verifying seconds of each step; empty if the call is unsupported."""
        sequences = [self._sequence(context) for context in contexts]
        budget = DraftBudget(depth, depth) if depth else DraftBudget()
        entries = tuple(ScheduledRequest(sequence, 1, budget) for sequence in sequences)
        if self._runner.supports(SchedulerOutput(0, entries, ROUNDS)):
            return []
        outcomes, times = self._runner.run(entries, ROUNDS, {})
        known = sum(sequence.computed for sequence in sequences)
        found = []
        for place, (draft, target) in enumerate(times.each or ((times.draft, times.target),)):
            found.append((float(known), draft, target))
            for outcome in outcomes[place * len(entries) : (place + 1) * len(entries)]:
                known += 1 + (len(outcome.result.path) if outcome.result is not None else 0)
        return found[1:] or found

    def _sequence(self, context: DraftContext) -> RequestState:
        if context.id not in self._sequences:
            sampling = SamplingParams(temperature=0.0, max_tokens=ENDLESS, ignore_eos=True)
            request = Request(
                context.id, tuple(context.tokens), sampling, 0, speculation=Speculation(acceptance_method="match")
            )
            self._sequences[context.id] = RequestState(request, list(context.tokens), len(context.tokens) - 1)
        return self._sequences[context.id]
