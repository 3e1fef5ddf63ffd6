"""Drafters without a model, which copy what followed the end of the text before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from cospec.core.plugin_base import Drafter
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.native import library
from cospec.rng.random_streams import Floats


class LookupNodes(NamedTuple):
    """The nodes of a draft.

    Attributes:
        confidence: of each node; None where the drafter has none.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    confidence: Sequence[float] | Floats | None = None


NO_NODES = LookupNodes((), ())


class LookupText(Protocol):
    """The known tokens of one sequence, and an index of what followed them before.

    Attributes:
        address: of the text in the native library; 0: the text is in Python.
        prompt_len: known tokens that are the prompt.
    """

    address: int
    prompt_len: int

    @property
    def size(self) -> int:
        """Number of known tokens that were read."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append known tokens."""

    def propose(self, assumed: Sequence[int], budget: DraftBudget) -> LookupNodes:
        """Draft after the known tokens and ``assumed`` ones; no nodes where the end of the text is new."""


class LookupDrafter(Drafter):
    """Drafts by lookup; a token costs next to nothing. A point mass: tokens are chosen, not drawn.

    Attributes:
        drafts_natively: the library has such texts. A subclass declares this again, since its drafts may be others.
        native: whether texts are in the native library.
        texts: known tokens of each sequence, by id.
    """

    samples = False
    reads_hidden_states = False
    drafts_natively: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.drafts_natively = vars(cls).get("drafts_natively", False)

    def __init__(self, name: str, native: bool) -> None:
        self.name = name
        self.texts: dict[str, LookupText] = {}
        self.use_library(native)

    def use_library(self, allowed: bool) -> None:
        """Keep texts in the library if this is allowed and possible; there are no texts yet."""
        self.native = allowed and self.drafts_natively and library.available()

    @abstractmethod
    def new_text(self, prompt_len: int) -> LookupText:
        """Return an empty text."""

    def text(self, id: str, prompt_len: int) -> LookupText:
        """Return the text of a sequence, empty if the sequence is new."""
        found = self.texts.get(id)
        if found is None:
            found = self.texts[id] = self.new_text(prompt_len)
        return found

    @property
    def native_lookups(self) -> LookupDrafter | None:
        """See ``Drafter``."""
        return self if self.native else None

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return a draft for each context whose end occurred before."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            known, committed, text = context.tokens, context.committed_len, self.text(context.id, context.prompt_len)
            if text.size < committed:
                text.extend(known[text.size : committed])
            if min(budget.depth, budget.max_nodes) < 1:
                continue
            tokens, parents, confidence = text.propose(known[committed:], budget)
            if tokens:
                shares = None if confidence is None else np.array(confidence)
                owners = (self.name,) * len(tokens)
                drafts.append(Draft(context.id, len(known), tokens, parents, owners, confidence=shares))
        return drafts

    def free(self, ids: Sequence[str]) -> None:
        """Drop the texts of finished sequences."""
        for id in ids:
            self.texts.pop(id, None)
