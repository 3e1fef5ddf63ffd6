"""An engine whose rounds are written down as its policy sees them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from cospec.config import EngineConfig
from cospec.engine.build import build_parts
from cospec.engine.engine import Engine, Parts
from cospec.engine.scheduler import Scheduler
from cospec.plugins import Policy
from cospec.policies.apart import apart
from cospec.stats import RoundStats
from cospec.types import Budget, Commit, Draft, Load


class Watch(Policy):
    """A policy that decides as another does and keeps every commit and every round's figures."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.commits: list[Commit] = []
        self.rounds: list[RoundStats] = []

    def clear(self) -> None:
        """Begin again."""
        self.commits.clear()
        self.rounds.clear()

    def plan(self, load: Load) -> list[Budget]:
        """As the policy does."""
        return self._policy.plan(load)

    @property
    def lasts(self) -> int:
        """As the policy's plan."""
        return self._policy.lasts

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """As the policy does."""
        return self._policy.trim(drafts)

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        """Write down, then as the policy does."""
        self.commits.extend(commits)
        self.rounds.extend(each for each, _ in apart(stats, commits))
        self._policy.observe(stats, commits)

    def learn(self) -> None:
        """As the policy does."""
        self._policy.learn()

    def gauges(self) -> Mapping[str, float]:
        """As the policy does."""
        return self._policy.gauges()


def watched_engine(config: EngineConfig) -> tuple[Engine, Watch]:
    """The engine of ``config``, and who watches it."""
    parts, watch = watched(build_parts(config))
    return Engine(parts, config), watch


def watched(parts: Parts) -> tuple[Parts, Watch]:
    """The same parts with somebody who watches."""
    scheduler = parts.scheduler
    watch = Watch(scheduler.policy)
    return replace(parts, scheduler=Scheduler(scheduler.pages, watch, scheduler.limits)), watch
