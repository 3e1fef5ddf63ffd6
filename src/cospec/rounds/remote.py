"""A drafter that works elsewhere, as the engine sees it: the same calls, answered by its handle."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from cospec.errors import DrafterLost
from cospec.plugins import Drafter
from cospec.rounds.desk import PATIENCE
from cospec.rounds.process import DrafterProcess
from cospec.types import Budget, Commit, Context, Draft


class RemoteDrafter(Drafter):
    """Implements ``protocols.Drafter`` by a process; while that is away there are no drafts."""

    def __init__(self, handle: DrafterProcess) -> None:
        self._handle = handle
        traits = handle.traits
        self.name, self.names = traits.name, traits.names
        self.samples, self.drafts_ahead, self.reads_states = traits.samples, traits.drafts_ahead, traits.reads_states
        self.offer, self.noises, self.learns = traits.offer, traits.noises, traits.learns

    @property
    def handle(self) -> DrafterProcess:
        """Of the process."""
        return self._handle

    def propose(self, contexts: Seq[Context], budgets: Seq[Budget]) -> list[Draft]:
        """Ask, and wait for the answer."""
        try:
            drafts: list[Draft] = self.handle.submit("propose", contexts, budgets).result(PATIENCE)
        except (DrafterLost, TimeoutError):
            return []
        return drafts

    def commit(self, commits: Seq[Commit]) -> None:
        """Tell it; it hears of it before it is asked again."""
        self.handle.submit("commit", commits)

    def free(self, ids: Seq[str]) -> None:
        """Tell it."""
        self.handle.submit("free", ids)

    def weights(self) -> Mapping[str, float]:
        """Of a pool's drafters, as the process sent them last."""
        return self._handle.weights
