"""An engine whose rounds are written down as its policy sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cospec.config import EngineConfig
from cospec.core.assembly import build_components
from cospec.core.engine import Engine, EngineComponents
from cospec.core.plugins import Policy
from cospec.core.scheduler import Scheduler
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.policies.goodput.split_steps import split_steps


class PolicyRecorder(Policy):
    """A policy that decides as another does and keeps every commit and every round's figures."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.commits: list[Commit] = []
        self.rounds: list[StepStats] = []

    def clear(self) -> None:
        """Begin again."""
        self.commits.clear()
        self.rounds.clear()

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """As the policy does."""
        return self._policy.plan(load)

    @property
    def horizon(self) -> int:
        """As the policy's plan."""
        return self._policy.horizon

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """As the policy does."""
        return self._policy.trim(drafts)

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Write down, then as the policy does."""
        self.commits.extend(commits)
        self.rounds.extend(each for each, _ in split_steps(stats, commits))
        self._policy.observe(stats, commits)

    def learn(self) -> None:
        """As the policy does."""
        self._policy.learn()

    def gauges(self) -> Mapping[str, float]:
        """As the policy does."""
        return self._policy.gauges()


def watched_engine(config: EngineConfig) -> tuple[Engine, PolicyRecorder]:
    """The engine of ``config``, and who watches it."""
    parts, watch = watched(build_components(config))
    return Engine(parts, config), watch


def watched(parts: EngineComponents) -> tuple[EngineComponents, PolicyRecorder]:
    """The same parts with somebody who watches."""
    scheduler = parts.scheduler
    watch = PolicyRecorder(scheduler.policy)
    return replace(parts, scheduler=Scheduler(scheduler.pages, watch, scheduler.limits)), watch
