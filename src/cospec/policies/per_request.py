"""A policy for each request that asks for one, and the configured policy for all others.

The policies that were asked for stand beside each other: each plans for its own requests and takes the others' known
tokens for work that the round does anyway; all learn from every round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cospec.core.plugins import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget, RequestState


class PolicyRouter(Policy):
    """A policy of policies; ``make(name)`` builds one that a request asks for, once."""

    def __init__(self, usual: Policy, make: Callable[[str], Policy]) -> None:
        self.usual, self._make = usual, make
        self._others: dict[str, Policy] = {}
        self._asked: dict[str, str] = {}  # sequences that chose, and what

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Everybody's budget from the policy of his choice."""
        chosen = {s.request.id: s.request.speculation.policy for s in load.ready if s.request.speculation.policy}
        self._asked = chosen  # only who is here now: nobody tells of those that were aborted
        if not chosen:
            return self.usual.plan(load)
        groups: dict[str, list[RequestState]] = defaultdict(list)
        for sequence in load.ready:
            groups[sequence.request.speculation.policy or ""].append(sequence)
        found: dict[str, DraftBudget] = {}
        for name, own in groups.items():
            others = len(load.ready) - len(own)
            part = replace(load, ready=own, catching_up=load.catching_up + others)
            budgets = self._policy(name).plan(part)
            found.update((sequence.request.id, budget) for sequence, budget in zip(own, budgets, strict=True))
        return [found[sequence.request.id] for sequence in load.ready]

    @property
    def horizon(self) -> int:
        """As long as the plan of the configured policy; a request with another one is asked about every round."""
        return 1 if self._asked else self.usual.horizon

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Each draft by the policy that asked for it."""
        if not self._asked:
            return self.usual.trim(drafts)
        groups: dict[str, list[Draft]] = defaultdict(list)
        for draft in drafts:
            groups[self._asked.get(draft.id, "")].append(draft)
        return [kept for name, own in groups.items() for kept in self._policy(name).trim(own)]

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Told to all."""
        self.usual.observe(stats, commits)
        for policy in self._others.values():
            policy.observe(stats, commits)
        for commit in commits:
            if commit.finish is not None:
                self._asked.pop(commit.id, None)

    def learn(self) -> None:
        """All policies learn from what they observed."""
        self.usual.learn()
        for policy in self._others.values():
            policy.learn()

    def gauges(self) -> Mapping[str, float]:
        """Those of the configured policy."""
        return self.usual.gauges()

    def _policy(self, name: str) -> Policy:
        if not name:
            return self.usual
        if name not in self._others:
            self._others[name] = self._make(name)
        return self._others[name]
