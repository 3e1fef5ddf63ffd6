"""Prompt lookup: draft the tokens that followed the same n-gram before (SmartSpec section 7).

The longest suffix of ``prompt_lookup_max`` down to ``prompt_lookup_min`` tokens that occurred earlier in the prompt or
output is looked up. The tokens after its latest occurrence are the draft. At the end of the text the copy repeats
itself, as in periodic text. The drafter has no model and no probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.interfaces import DrafterBuildContext
from cospec.plugin_options import Options


class NgramOptions(Options):
    """Options of ``ngram``.

    Attributes:
        prompt_lookup_max: tokens of the longest suffix that is looked up.
        prompt_lookup_min: tokens of the shortest suffix that is looked up.
    """

    prompt_lookup_max: int = Field(default=4, ge=1, le=32)
    prompt_lookup_min: int = Field(default=2, ge=1, le=32, validate_default=True)

    @field_validator("prompt_lookup_min")
    @classmethod
    def _check_order(cls, shortest: int, info: ValidationInfo) -> int:
        longest = info.data.get("prompt_lookup_max", shortest)
        if shortest > longest:
            raise PydanticCustomError("order", "at most prompt_lookup_max, here {longest}", {"longest": longest})
        return shortest


class _Index:
    """The latest end of each n-gram of one sequence that has a next token."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(shortest, longest + 1)
        self._last: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def find(self, tokens: Sequence[int], committed: int) -> int | None:
        """Return the position after the latest earlier occurrence of the longest known suffix; None if there is
        none."""
        known = len(tokens)
        for end in range(max(1, self._indexed), committed):
            for size in self._sizes:
                if size <= end:
                    self._last[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, committed)
        for size in reversed(self._sizes):
            found = self._last.get(tuple(tokens[known - size : known])) if size < known else None
            if found is not None:
                return found
        return None


def _copy_periodic(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """Return ``count`` tokens from ``start`` on; beyond the end, the copied tokens repeat."""
    known = list(tokens[start : start + count])
    return tuple(known[i % len(known)] for i in range(count))


class NgramDrafter(Drafter):
    """Drafts by n-gram lookup; a token costs a few dictionary lookups."""

    samples = False
    reads_hidden_states = False
    capabilities = DrafterCapabilities(costless=True, chains=True)
    drafts_ahead = True
    learns = False
    Options: ClassVar[type[NgramOptions]] = NgramOptions

    def __init__(self, shortest: int = 2, longest: int = 4, name: str = "ngram") -> None:
        self.name = name
        self._bounds = (shortest, longest)
        self._indices: dict[str, _Index] = {}

    @classmethod
    def build(cls, options: NgramOptions, build_context: DrafterBuildContext) -> NgramDrafter:
        """Build the drafter; the build context does not matter."""
        return cls(options.prompt_lookup_min, options.prompt_lookup_max)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return a chain for each context whose suffix occurred before."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            depth = min(budget.depth, budget.max_nodes)
            index = self._indices.setdefault(context.id, _Index(*self._bounds))
            start = index.find(context.tokens, context.committed_len)
            if start is None or depth < 1:
                continue
            tokens = _copy_periodic(context.tokens, start, depth)
            n = len(tokens)
            drafts.append(Draft(context.id, len(context.tokens), tokens, tuple(range(-1, n - 1)), (self.name,) * n))
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        """Do nothing: ``propose`` reads committed tokens."""

    def free(self, ids: Sequence[str]) -> None:
        """Drop the indices of finished sequences."""
        for id in ids:
            self._indices.pop(id, None)
