"""Split the statistics of a multi-step call into one record per step, as a policy observes single steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import Commit, DraftBudget

Step = tuple[StepStats, Sequence[Commit], Mapping[str, DraftBudget]]
"""The statistics of a step, its commits, and the budgets of its plan."""


def split_steps(stats: StepStats, commits: Sequence[Commit]) -> Iterator[tuple[StepStats, Sequence[Commit]]]:
    """Yield each step with its commits. Time of the call outside models and plan is divided equally.

    Drafting before the first step, as a pool's scoring, belongs to the first step.
    """
    steps = stats.times.steps
    if steps == 1:
        yield stats, commits
        return
    rest = (stats.total - stats.planning - stats.times.draft - stats.times.target) / steps
    before = stats.times.draft - sum([draft for draft, _ in stats.times.each])
    size = len(commits) // steps  # the steps have the same sequences, with one known token each
    for place, (draft, target) in enumerate(stats.times.each):
        own = commits[place * size : (place + 1) * size]
        planning, scoring = (0.0, 0.0) if place else (stats.planning, stats.times.scoring)
        draft += 0.0 if place else before
        drafted = [commit.drafted for commit in own]
        proposed = sum(drafted)
        part = StepStats(
            step=stats.step,
            sequences=size,
            batched_tokens=size + proposed,
            context_tokens=sum([commit.base_len - 1 for commit in own]),
            depth=max(drafted),
            proposed=proposed,
            accepted=sum([len(commit.path) for commit in own]) if proposed else 0,
            committed=sum([len(commit.tokens) for commit in own]) if proposed else size,
            times=StepTimes(draft, target, scoring=scoring),
            total=planning + draft + target + rest,
            drafts=sum([number > 0 for number in drafted]),
            planning=planning,
        )
        yield part, own


class ObservedSteps:
    """Calls that were observed but not learned from. ``add`` runs for every call, so it does little.

    Attributes:
        steps: steps since ``restart``, taken or not.
        seconds: seconds since ``restart``.
    """

    def __init__(self) -> None:
        self._calls: list[Step] = []
        self._several = False  # a stored call has several steps
        self.steps, self.seconds = 0, 0.0
        self._latest = 1

    def add(self, stats: StepStats, commits: Sequence[Commit], budgets: Mapping[str, DraftBudget]) -> int:
        """Store a call; returns the number of stored calls."""
        self._calls.append((stats, commits, budgets))
        self._latest = steps = len(stats.times.each) or 1
        if steps > 1:
            self._several = True
        self.steps += steps
        self.seconds += stats.total
        return len(self._calls)

    def take(self) -> list[Step]:
        """Return all steps of the stored calls, and clear the store."""
        calls, self._calls = self._calls, []
        if not self._several:
            return calls
        self._several = False
        return [(*step, budgets) for stats, commits, budgets in calls for step in split_steps(stats, commits)]

    def advance(self) -> int:
        """Return the steps of the latest call; 1 if no call was added since the last ``advance``."""
        latest, self._latest = self._latest, 1
        return latest

    def restart(self) -> None:
        """Reset ``steps`` and ``seconds``."""
        self.steps, self.seconds = 0, 0.0
