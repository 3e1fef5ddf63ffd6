"""A drafter that works elsewhere, as the engine sees it: the same calls, answered by its executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cospec.core.drafter_capabilities import TokenScores
from cospec.core.interfaces import Executor
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.errors import DrafterLost
from cospec.runtime.executor_base import DRAFT_TIMEOUT
from cospec.runtime.messages import DrafterInfo


class RemoteExecutor(Executor, Protocol):
    """An executor that knows what its drafter declares, and a pool's weights as they were sent last."""

    @property
    def info(self) -> DrafterInfo: ...
    @property
    def weights(self) -> Mapping[str, float]: ...


class DrafterProxy(Drafter):
    """A ``Drafter`` elsewhere; while its executor is not present there are no drafts."""

    def __init__(self, executor: RemoteExecutor) -> None:
        self._executor = executor
        info = executor.info
        self.name, self.member_names = info.name, info.member_names
        self.samples, self.drafts_ahead, self.reads_hidden_states = (
            info.samples,
            info.drafts_ahead,
            info.reads_hidden_states,
        )
        self.capabilities, self.stream_kinds, self.learns = info.capabilities, info.stream_kinds, info.learns
        self.is_stepwise, self.drafts_for_outcomes, self.trusted = (
            info.is_stepwise,
            info.drafts_for_outcomes,
            info.trusted,
        )

    @property
    def executor(self) -> RemoteExecutor:
        """Where the drafter works."""
        return self._executor

    @property
    def scores_known_tokens(self) -> bool:  # type: ignore[override]
        """Whether the drafter can score known tokens now; changes with the nodes that serve the drafter."""
        return self._executor.info.scores_known_tokens

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Ask, and wait for the answer; no drafts where none comes in time."""
        try:
            drafts: list[Draft] = self.executor.submit("propose", contexts, budgets).result(DRAFT_TIMEOUT)
        except (DrafterLost, TimeoutError):
            return []
        return drafts

    def score_known_tokens(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        """Ask, and wait for the answer; no scores where none comes in time. A pool submits the call and never waits."""
        try:
            scores: dict[str, TokenScores] = self.executor.submit("score_known_tokens", contexts).result(DRAFT_TIMEOUT)
        except (DrafterLost, TimeoutError):
            return {}
        return scores

    def commit(self, commits: Sequence[Commit]) -> None:
        """Send the commits; the drafter gets them before the next ``propose``."""
        self.executor.submit("commit", commits)

    def free(self, ids: Sequence[str]) -> None:
        """Send the ids."""
        self.executor.submit("free", ids)

    def close(self) -> None:
        """End the drafter's thread or process."""
        self._executor.close()

    def weights(self) -> Mapping[str, float]:
        """Of a pool's drafters, as its executor got them last."""
        return self._executor.weights
