"""Drafts by repeating phrases: the n-gram after the last punctuation mark is looked up in the sequence.

A phrase that begins as an earlier phrase did often goes on as that phrase. So the look-up key never reaches back beyond
the last punctuation mark, which the key includes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field
from tokenizers import Tokenizer

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.interfaces import DrafterBuildContext
from cospec.plugin_options import Options

MARKS = frozenset(".,;:!?")


class PhraseOptions(Options):
    """Keys of ``speculative_config`` for this drafter.

    Attributes:
        longest: tokens of the look-up key at most.
    """

    longest: int = Field(default=4, ge=1, le=32)


class PhraseDrafter(Drafter):
    """A chain of the tokens that followed the latest earlier occurrence of the key.

    Args:
        marks: token ids that end a phrase.
        longest: tokens of the look-up key at most.
    """

    samples = False  # the tokens are chosen, not drawn
    drafts_ahead = True  # assumed tokens are continued like committed tokens
    reads_hidden_states = False
    learns = False  # drafts read their own sequence only
    capabilities = DrafterCapabilities(costless=True, chains=True)  # a proposal costs next to nothing, and is a chain
    Options: ClassVar[type[PhraseOptions]] = PhraseOptions

    def __init__(self, marks: frozenset[int] = frozenset(), longest: int = 4, name: str = "phrases") -> None:
        self.name = name
        self._marks, self._longest = marks, longest

    @classmethod
    def build(cls, options: PhraseOptions, host: DrafterBuildContext) -> PhraseDrafter:
        """Read the marks from the target's tokenizer; a target without a tokenizer has none."""
        return cls(_marks(host.target_path), options.longest)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """A chain for each context whose key occurred before."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            tokens = self._continued(context.tokens, min(budget.depth, budget.max_nodes))
            if tokens:
                parents = tuple(range(-1, len(tokens) - 1))
                drafts.append(Draft(context.id, len(context.tokens), tokens, parents, (self.name,) * len(tokens)))
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        """Nothing to learn: each context holds the whole sequence."""

    def free(self, ids: Sequence[str]) -> None:
        """Nothing is kept."""

    def _continued(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Up to ``count`` tokens, none without an earlier occurrence of the key."""
        if count < 1:
            return ()
        known = list(tokens)
        for size in range(self._key_length(known), 0, -1):
            key = known[-size:]
            for end in range(len(known) - 1, size - 1, -1):
                if known[end - size : end] == key:
                    return tuple(known[end : end + count])
        return ()

    def _key_length(self, tokens: list[int]) -> int:
        """Tokens since the last mark, the mark included, within bounds."""
        most = min(self._longest, len(tokens))
        since = next((size for size in range(1, most + 1) if tokens[-size] in self._marks), most)
        return since


def _marks(folder: Path | None) -> frozenset[int]:
    """The token ids that are punctuation marks."""
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.exists():
        return frozenset()
    vocabulary = Tokenizer.from_file(str(file)).get_vocab()
    return frozenset(token for piece, token in vocabulary.items() if piece in MARKS)
