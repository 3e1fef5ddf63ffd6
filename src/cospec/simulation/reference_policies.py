"""Policies of a simulation: an oracle and random lengths (SmartSpec 7.2.1), and a policy that records its steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget, RequestState
from cospec.policies.latency.forward import ForwardLatency
from cospec.simulation.results import StepLog
from cospec.simulation.simulated_drafter import SimulatedDrafter

LONGEST = 8


class PlannedOnly(Policy):
    """A policy that keeps every draft and learns nothing."""

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Keep every draft."""
        return drafts

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Nothing to learn."""

    def learn(self) -> None:
        """Nothing to learn."""

    def gauges(self) -> Mapping[str, float]:
        """None."""
        return {}


class Oracle(PlannedOnly):
    """Drafts exactly the tokens that will be accepted, if worthwhile: the upper bound of every policy for chains."""

    def __init__(self, drafter: SimulatedDrafter, target: ForwardLatency, draft: ForwardLatency, longest: int) -> None:
        self._drafter, self._target, self._draft, self._longest = drafter, target, draft, longest

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Choose the length with the most tokens per second, at most the number of correct tokens."""
        right = [self._right(sequence) for sequence in load.ready]
        count = len(right)
        context = sum(sequence.computed for sequence in load.ready)
        best, most = 0.0, 0
        drafting = 0.0
        others = count + load.other_prefill_tokens
        prompts = self._target.tokens(others) - self._target.tokens(count)  # prompts run in any case
        for length in range(self._longest + 1):
            kept = sum(min(each, length) for each in right)
            active = sum(each >= length for each in right) if length else 0
            if active and not self._drafter.capabilities.costless:
                drafting += self._draft.each(context * active / count, active)
                drafting += self._draft.start + self._draft.sequence * active if length == 1 else 0.0
            seconds = drafting + self._target.seconds(context, kept + others, count) - prompts
            speed = (kept + count) / seconds
            if speed > best:
                best, most = speed, length
        return [DraftBudget(min(each, most), min(each, most)) for each in right]

    def _right(self, sequence: RequestState) -> int:
        return self._drafter.correct_tokens(sequence.id, sequence.output_len, self._longest)


class Random(PlannedOnly):
    """A random length from 0 to the longest for each sequence and step, drawn by seed."""

    def __init__(self, longest: int, seed: int) -> None:
        self._longest, self._random = longest, random.Random(seed)

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Draw the lengths."""
        lengths = [self._random.randint(0, self._longest) for _ in load.ready]
        return [DraftBudget(length, length) for length in lengths]


class RecordedPolicy(Policy):
    """A policy with a record of the steps that the policy planned."""

    def __init__(self, policy: Policy, steps: StepLog) -> None:
        self._policy, self._steps = policy, steps

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """See the wrapped policy."""
        return self._policy.plan(load)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """See the wrapped policy."""
        return self._policy.trim(drafts)

    def learn(self) -> None:
        """See the wrapped policy."""
        self._policy.learn()

    def gauges(self) -> Mapping[str, float]:
        """See the wrapped policy."""
        return self._policy.gauges()

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Record the statistics and pass them to the policy."""
        self._steps.add(stats)
        self._policy.observe(stats, commits)
