"""Rounds that were run as one, each by itself again, as a policy would have seen them step by step."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from cospec.stats import RoundStats, RoundTimes
from cospec.types import Commit


def apart(stats: RoundStats, commits: Seq[Commit]) -> Iterator[tuple[RoundStats, Seq[Commit]]]:
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
        part = RoundStats(
            step=stats.step,
            sequences=size,
            batched_tokens=size + proposed,
            context_tokens=sum([commit.base_len - 1 for commit in own]),
            depth=max(drafted),
            proposed=proposed,
            accepted=sum([len(commit.path) for commit in own]) if proposed else 0,
            committed=sum([len(commit.tokens) for commit in own]) if proposed else size,
            times=RoundTimes(draft, target),
            total=planning + draft + target + rest,
            drafts=sum([number > 0 for number in drafted]),
            planning=planning,
        )
        yield part, own
