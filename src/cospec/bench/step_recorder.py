"""An engine that records its steps as the policy sees the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cospec.assembly.build import build_components
from cospec.config import EngineConfig
from cospec.core.engine import Engine, EngineComponents
from cospec.core.plugin_base import Policy
from cospec.core.scheduler import Scheduler
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.policies.goodput.observed_steps import split_steps


class PolicyRecorder(Policy):
    """A policy that delegates its decisions, and records every commit and every step's statistics."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.commits: list[Commit] = []
        self.steps: list[StepStats] = []

    def clear(self) -> None:
        """Clear the records."""
        self.commits.clear()
        self.steps.clear()

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """See the wrapped policy."""
        return self._policy.plan(load)

    @property
    def horizon(self) -> int:
        """See the wrapped policy."""
        return self._policy.horizon

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """See the wrapped policy."""
        return self._policy.trim(drafts)

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Record, then pass to the wrapped policy."""
        self.commits.extend(commits)
        self.steps.extend(each for each, _ in split_steps(stats, commits))
        self._policy.observe(stats, commits)

    def learn(self) -> None:
        """See the wrapped policy."""
        self._policy.learn()

    def gauges(self) -> Mapping[str, float]:
        """See the wrapped policy."""
        return self._policy.gauges()


def recorded_engine(config: EngineConfig) -> tuple[Engine, PolicyRecorder]:
    """Build the engine of ``config`` with a recorder."""
    parts, recorder = recorded(build_components(config))
    return Engine(parts, config), recorder


def recorded(parts: EngineComponents) -> tuple[EngineComponents, PolicyRecorder]:
    """Return the same components with a recorder."""
    scheduler = parts.scheduler
    recorder = PolicyRecorder(scheduler.policy)
    return replace(parts, scheduler=Scheduler(scheduler.pages, recorder, scheduler.limits)), recorder
