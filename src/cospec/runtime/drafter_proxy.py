"""A drafter that works elsewhere, as the engine sees it: the same calls, answered by its handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cospec.core.plugins import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.errors import DrafterLost
from cospec.execution.draft_dispatcher import DRAFT_TIMEOUT
from cospec.runtime.process_executor import ProcessExecutor


class DrafterProxy(Drafter):
    """Implements ``protocols.Drafter`` by a process; while that is away there are no drafts."""

    def __init__(self, executor: ProcessExecutor) -> None:
        self._handle = executor
        traits = executor.traits
        self.name, self.names = traits.name, traits.names
        self.samples, self.drafts_ahead, self.reads_states = traits.samples, traits.drafts_ahead, traits.reads_states
        self.capabilities, self.stream_kinds, self.learns = traits.capabilities, traits.stream_kinds, traits.learns

    @property
    def executor(self) -> ProcessExecutor:
        """Of the process."""
        return self._handle

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Ask, and wait for the answer."""
        try:
            drafts: list[Draft] = self.executor.submit("propose", contexts, budgets).result(DRAFT_TIMEOUT)
        except (DrafterLost, TimeoutError):
            return []
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        """Tell it; it hears of it before it is asked again."""
        self.executor.submit("commit", commits)

    def free(self, ids: Sequence[str]) -> None:
        """Tell it."""
        self.executor.submit("free", ids)

    def weights(self) -> Mapping[str, float]:
        """Of a pool's drafters, as the process sent them last."""
        return self._handle.weights
