"""The drafters that the native library runs in its steps: models and lookups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cospec.core.interfaces import NativeForward
from cospec.core.types import RequestState, ScheduledRequest
from cospec.drafters.draft_kv_cache import CATCH_UP_TOKENS
from cospec.drafters.interfaces import DraftCache
from cospec.drafters.lookup import LookupDrafter

TREE = "tree draft"
NEAR_LIMIT = "the request is near the drafter's context limit"
TRUNCATED = "truncated sampling"
LENGTH_BY_CONFIDENCE = "a draft whose length depends on its confidence"


class NativeDrafter(ABC):
    """A drafter of chains in the library.

    Attributes:
        name: written on the tokens.
    """

    name: str

    @abstractmethod
    def reason_against(self, entry: ScheduledRequest, ahead: int) -> str | None:
        """Return why the library cannot draft for an entry; None where the library can. Pure.

        Args:
            ahead: tokens after the known tokens that the drafter's cache must have room for.
        """

    @abstractmethod
    def has_room(self, lengths: Sequence[tuple[str, int]]) -> bool:
        """Whether the drafter's cache has room for requests of these ids and lengths at a time. Pure."""

    @abstractmethod
    def reserve(self, sequence: RequestState, ahead: int) -> int | None:
        """Make room for ``ahead`` tokens; returns the known tokens that the drafter has read, None without room."""

    @abstractmethod
    def handles(self, id: str) -> tuple[int, int, int, int, int]:
        """Return the fields ``drafter`` to ``lookup`` of ``RequestSlot``."""

    @abstractmethod
    def report_read(self, id: str, tokens: int) -> None:
        """Report that a call had the drafter read the first ``tokens`` known tokens."""


class NativeModel(NativeDrafter):
    """A model with its KV cache.

    Args:
        chains: drafts chains whatever the budget's shape, as a pool without branches does.
    """

    def __init__(self, kv_cache: DraftCache, forward: NativeForward, name: str, chains: bool) -> None:
        self.name = name
        self._kv_cache, self._forward, self._chains = kv_cache, forward, chains

    def reason_against(self, entry: ScheduledRequest, ahead: int) -> str | None:
        """See ``NativeDrafter``."""
        sequence, budget, known = entry.sequence, entry.budget, len(entry.sequence.tokens)
        params = sequence.request.sampling
        if params.truncates and not params.greedy:
            return TRUNCATED
        if not (budget.is_chain or self._chains):
            return TREE
        if budget.confident or budget.threshold:
            return LENGTH_BY_CONFIDENCE
        if self._kv_cache.backlog_len(sequence.id, known) > CATCH_UP_TOKENS:
            return "the drafter has a long backlog"
        return NEAR_LIMIT if known + ahead > self._kv_cache.model.max_len else None

    def has_room(self, lengths: Sequence[tuple[str, int]]) -> bool:
        """See ``NativeDrafter``."""
        return self._kv_cache.model.pages.can_allocate(lengths)

    def reserve(self, sequence: RequestState, ahead: int) -> int | None:
        """See ``NativeDrafter``."""
        return self._kv_cache.reserve(sequence.id, sequence.tokens, ahead)

    def handles(self, id: str) -> tuple[int, int, int, int, int]:
        """See ``NativeDrafter``."""
        return *self._forward.handles, *self._forward.pages(id), 0

    def report_read(self, id: str, tokens: int) -> None:
        """See ``NativeDrafter``."""
        self._kv_cache.report_written(id, tokens)


class NativeLookup(NativeDrafter):
    """A drafter that looks up the end of the text; needs no room and no probabilities."""

    def __init__(self, drafter: LookupDrafter, name: str) -> None:
        self.name, self._drafter = name, drafter

    def reason_against(self, entry: ScheduledRequest, ahead: int) -> str | None:
        """See ``NativeDrafter``."""
        budget = entry.budget
        if not (budget.is_chain or self._drafter.capabilities.chains):
            return TREE
        return LENGTH_BY_CONFIDENCE if budget.confident or budget.threshold else None

    def has_room(self, lengths: Sequence[tuple[str, int]]) -> bool:
        """See ``NativeDrafter``."""
        return True

    def reserve(self, sequence: RequestState, ahead: int) -> int:
        """See ``NativeDrafter``."""
        return min(self._drafter.text(sequence.id, sequence.prompt_len).size, len(sequence.tokens) - 1)

    def handles(self, id: str) -> tuple[int, int, int, int, int]:
        """See ``NativeDrafter``."""
        return 0, 0, 0, 0, self._drafter.texts[id].address

    def report_read(self, id: str, tokens: int) -> None:
        """Do nothing: the text knows its size."""
