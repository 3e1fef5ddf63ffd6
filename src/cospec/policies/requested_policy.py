"""Applies to each request the policy that the request names, and to all others the configured policy.

Each policy plans for its own requests and counts other requests' tokens as known tokens of the step. All policies
observe every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget, RequestState


class RequestedPolicy(Policy):
    """A policy that delegates to others; ``make(name)`` builds a requested policy once."""

    def __init__(self, default: Policy, make: Callable[[str], Policy]) -> None:
        self.default, self._make, self.trees = default, make, default.trees
        self._policies: dict[str, Policy] = {}
        self._choices: dict[str, str] = {}  # policy name by request id, for requests that chose a policy

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Return each request's budget from the policy of its choice."""
        chosen = {s.request.id: s.request.speculation.policy for s in load.ready if s.request.speculation.policy}
        self._choices = chosen  # only present requests: aborted requests are not reported
        if not chosen:
            return self.default.plan(load)
        groups: dict[str, list[RequestState]] = defaultdict(list)
        for sequence in load.ready:
            groups[sequence.request.speculation.policy or ""].append(sequence)
        found: dict[str, DraftBudget] = {}
        for name, own in groups.items():
            others = len(load.ready) - len(own)
            part = replace(load, ready=own, other_prefill_tokens=load.other_prefill_tokens + others)
            budgets = self._policy(name).plan(part)
            found.update((sequence.request.id, budget) for sequence, budget in zip(own, budgets, strict=True))
        return [found[sequence.request.id] for sequence in load.ready]

    @property
    def horizon(self) -> int:
        """The configured policy's horizon; 1 if any request chose another policy."""
        return 1 if self._choices else self.default.horizon

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Trim each draft by the policy that planned it."""
        if not self._choices:
            return self.default.trim(drafts)
        groups: dict[str, list[Draft]] = defaultdict(list)
        for draft in drafts:
            groups[self._choices.get(draft.id, "")].append(draft)
        return [kept for name, own in groups.items() for kept in self._policy(name).trim(own)]

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Pass the step to all policies."""
        self.default.observe(stats, commits)
        for policy in self._policies.values():
            policy.observe(stats, commits)
        for commit in commits:
            if commit.finish is not None:
                self._choices.pop(commit.id, None)

    def learn(self) -> None:
        """Let all policies learn from observed steps."""
        self.default.learn()
        for policy in self._policies.values():
            policy.learn()

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of the configured policy."""
        return self.default.gauges()

    def _policy(self, name: str) -> Policy:
        if not name:
            return self.default
        if name not in self._policies:
            self._policies[name] = self._make(name)
        return self._policies[name]
