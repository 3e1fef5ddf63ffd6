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
from cospec.core.types import Commit, DraftBudget
from cospec.drafters.interfaces import DrafterBuildContext
from cospec.drafters.lookup import NO_NODES, LookupDrafter, LookupNodes, LookupText
from cospec.native import lookups
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


class NgramText:
    """The latest end of each n-gram of one sequence that has a next token. Implements ``LookupText``."""

    address = 0

    def __init__(self, prompt_len: int, shortest: int, longest: int) -> None:
        self.prompt_len = prompt_len
        self._sizes = range(shortest, longest + 1)
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}

    @property
    def size(self) -> int:
        """See ``LookupText``."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """See ``LookupText``."""
        known = self._tokens
        for token in tokens:
            end = len(known)  # the n-grams that end here have a next token now
            for size in self._sizes:
                if size <= end:
                    self._last[tuple(known[end - size :])] = end
            known.append(token)

    def propose(self, assumed: Sequence[int], budget: DraftBudget) -> LookupNodes:
        """See ``LookupText``."""
        tokens, count = [*self._tokens, *assumed] if assumed else self._tokens, min(budget.depth, budget.max_nodes)
        for size in reversed(self._sizes):
            found = self._last.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if found is not None:
                return LookupNodes(_copy_periodic(tokens, found, count), tuple(range(-1, count - 1)))
        return NO_NODES


def _copy_periodic(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """Return ``count`` tokens from ``start`` on; beyond the end, the copied tokens repeat."""
    known = tokens[start : start + count]
    return tuple([known[i % len(known)] for i in range(count)])


class NgramDrafter(LookupDrafter):
    """Drafts by n-gram lookup."""

    capabilities = DrafterCapabilities(costless=True, chains=True)
    drafts_ahead = True
    learns = False
    drafts_natively = True
    Options: ClassVar[type[NgramOptions]] = NgramOptions

    def __init__(self, shortest: int = 2, longest: int = 4, name: str = "ngram", native: bool = False) -> None:
        super().__init__(name, native)
        self._bounds = (shortest, longest)

    @classmethod
    def build(cls, options: NgramOptions, build_context: DrafterBuildContext) -> NgramDrafter:
        """Build the drafter."""
        made = cls(options.prompt_lookup_min, options.prompt_lookup_max)
        made.use_library(build_context.native)
        return made

    def new_text(self, prompt_len: int) -> LookupText:
        """See ``LookupDrafter``."""
        return (lookups.ngram_text if self.native else NgramText)(prompt_len, *self._bounds)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Do nothing: texts read committed tokens before they draft."""
