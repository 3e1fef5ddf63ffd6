"""Prompt lookup: what followed the same words before (spec section 4, ``ngram``; SmartSpec section 7).

The longest suffix of the sequence, of ``prompt_lookup_max`` down to ``prompt_lookup_min`` tokens, that occurred earlier
in prompt or output is looked up, and what followed its latest occurrence is the draft. Where the end comes first, the
copy goes on with itself, as in periodic text. No model, no probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from cospec.core.interfaces import DrafterBuildContext
from cospec.core.plugins import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, DrafterCapabilities
from cospec.errors import InvalidInput
from cospec.options import Options


class NgramOptions(Options):
    """Bounds, in tokens, of the suffix that is looked up."""

    prompt_lookup_max: int = Field(default=4, ge=1, le=32)
    prompt_lookup_min: int = Field(default=2, ge=1, le=32)


class _Index:
    """Where each n-gram of one sequence last ended, among those that something follows."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(shortest, longest + 1)
        self._last: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def find(self, tokens: Sequence[int], committed: int) -> int | None:
        """The position behind the latest earlier occurrence of the longest known suffix among committed tokens."""
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


def _copied(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """``count`` tokens from ``start`` on; behind the end they go on as what was copied, so a loop goes round."""
    known = list(tokens[start : start + count])
    return tuple(known[i % len(known)] for i in range(count))


class NgramDrafter(Drafter):
    """Costs a few dictionary look-ups per token."""

    samples = False
    reads_states = False
    capabilities = DrafterCapabilities(free=True, chains=True)
    drafts_ahead = True
    learns = False
    Options: ClassVar[type[NgramOptions]] = NgramOptions

    def __init__(self, shortest: int = 2, longest: int = 4, name: str = "ngram") -> None:
        self.name = name
        self._bounds = (shortest, longest)
        self._indices: dict[str, _Index] = {}

    @classmethod
    def build(cls, options: NgramOptions, build_context: DrafterBuildContext) -> NgramDrafter:
        """Needs nothing of the host."""
        shortest, longest = options.prompt_lookup_min, options.prompt_lookup_max
        if shortest > longest:
            allowed = f"at most prompt_lookup_max, here {longest}"
            raise InvalidInput("speculative_config.prompt_lookup_min", shortest, allowed)
        return cls(shortest, longest)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """A chain for each context whose suffix occurred before."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            depth = min(budget.depth, budget.max_nodes)
            index = self._indices.setdefault(context.id, _Index(*self._bounds))
            start = index.find(context.tokens, context.committed)
            if start is None or depth < 1:
                continue
            tokens = _copied(context.tokens, start, depth)
            n = len(tokens)
            drafts.append(Draft(context.id, len(context.tokens), tokens, tuple(range(-1, n - 1)), (self.name,) * n))
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        """The index reads committed tokens when it is next asked."""

    def free(self, ids: Sequence[str]) -> None:
        """Drop the indices of ended sequences."""
        for id in ids:
            self._indices.pop(id, None)
