"""Texts whose next tokens the native library looks up: ``csrc/spec/lookup.h``."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence

from cospec.core.types import DraftBudget
from cospec.drafters.lookup import LookupNodes, LookupText
from cospec.native import library, structs
from cospec.native.library import start

_SHAPE = structs.packer(structs.LookupShape)


class NativeText(LookupText):
    """The known tokens of one sequence in the library. ``address`` is valid while the object lives.

    Args:
        address: of a new ``Lookup``.
        confident: whether its nodes have confidences.
        responses: kept alive, where the lookup reads these.
    """

    def __init__(
        self, address: int, prompt_len: int, confident: bool = False, responses: NativeResponses | None = None
    ) -> None:
        self.address, self.prompt_len = address, prompt_len
        self._confident, self._responses = confident, responses
        self._library = library.cdll()
        weakref.finalize(self, self._library.cospec_lookup_free, address)

    @property
    def size(self) -> int:
        """See ``LookupText``."""
        return int(self._library.cospec_lookup_size(self.address))

    def extend(self, tokens: Sequence[int]) -> None:
        """See ``LookupText``."""
        words = array("q", tokens)
        self._library.cospec_lookup_extend(self.address, start(words), len(words))

    def propose(self, assumed: Sequence[int], budget: DraftBudget) -> LookupNodes:
        """See ``LookupText``."""
        most, after, widths = budget.max_nodes, array("q", assumed), array("q", budget.widths)
        shape = _SHAPE.pack(budget.depth, most, start(widths), len(widths), budget.threshold)
        room, shares = array("q", bytes(16 * most)), array("d", bytes(8 * most))
        count = self._library.cospec_lookup_propose(
            self.address, start(after), len(after), shape, start(room), start(room) + 8 * most, start(shares)
        )
        own = shares[:count] if self._confident else None
        return LookupNodes(tuple(room[:count]), tuple(room[most : most + count]), own)


class NativeResponses:
    """``drafters.suffix.SharedResponses`` in the library."""

    def __init__(self, max_tokens: int) -> None:
        found = library.cdll()
        self.address = int(found.cospec_responses_new(max_tokens))
        weakref.finalize(self, found.cospec_responses_free, self.address)

    @property
    def size(self) -> int:
        """See ``SharedResponses``."""
        return int(library.cdll().cospec_responses_size(self.address))

    def new_text(self, prompt_len: int, min_match: int) -> NativeText:
        """See ``SharedResponses``."""
        return NativeText(library.cdll().cospec_suffix_new(self.address, min_match), prompt_len, True, self)

    def add(self, text: LookupText, first: int, end: int) -> None:
        """See ``SharedResponses``; the text is one of ``new_text``."""
        library.cdll().cospec_responses_add(self.address, text.address, first, end)


def ngram_text(prompt_len: int, shortest: int, longest: int) -> NativeText:
    """Return a text whose next tokens follow n-grams of these sizes, as in ``drafters.ngram``."""
    return NativeText(library.cdll().cospec_ngram_new(shortest, longest), prompt_len)
