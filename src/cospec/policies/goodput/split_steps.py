"""Rounds that were run as one, each by itself again, as a policy would have seen them step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import Commit, DraftBudget

Step = tuple[StepStats, Sequence[Commit], Mapping[str, DraftBudget]]
"""What a step took, what it committed, and the budgets that it was planned with."""


def split_steps(stats: StepStats, commits: Sequence[Commit]) -> Iterator[tuple[StepStats, Sequence[Commit]]]:
    """Every round with its commits. What the call took beside models and plan falls on all of them alike."""
    rounds = stats.times.rounds
    if rounds == 1:
        yield stats, commits
        return
    rest = (stats.total - stats.planning - stats.times.draft - stats.times.target) / rounds
    size = len(commits) // rounds  # such rounds are of the same sequences, with one known token each
    for place, (draft, target) in enumerate(stats.times.each):
        own = commits[place * size : (place + 1) * size]
        planning = 0.0 if place else stats.planning
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
            times=StepTimes(draft, target),
            total=planning + draft + target + rest,
            drafts=sum([number > 0 for number in drafted]),
            planning=planning,
        )
        yield part, own


class ObservedSteps:
    """Calls that were observed and not learned from yet. ``add`` is called for every call, so it does next to nothing.

    Attributes:
        steps: since ``restart``, whether or not they were taken.
        seconds: the same in seconds.
    """

    def __init__(self) -> None:
        self._calls: list[Step] = []
        self.steps, self.seconds = 0, 0.0
        self._latest = 1

    def add(self, stats: StepStats, commits: Sequence[Commit], budgets: Mapping[str, DraftBudget]) -> int:
        """Keep a call; returns how many are kept."""
        self._calls.append((stats, commits, budgets))
        self._latest = stats.times.rounds
        self.steps += self._latest
        self.seconds += stats.total
        return len(self._calls)

    def take(self) -> list[Step]:
        """All steps of the kept calls, each by itself; nothing is kept afterwards."""
        calls, self._calls = self._calls, []
        return [(*step, budgets) for stats, commits, budgets in calls for step in split_steps(stats, commits)]

    def advance(self) -> int:
        """Steps of the latest call; 1 where no call came since the latest ``advance``."""
        latest, self._latest = self._latest, 1
        return latest

    def restart(self) -> None:
        """Count ``steps`` and ``seconds`` from here on."""
        self.steps, self.seconds = 0, 0.0
