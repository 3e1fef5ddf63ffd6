"""Accounting of a paged KV cache: the pages of each sequence and the shared prefixes. No tensors.

A page holds ``page_size`` positions. A page full of committed tokens can be shared. Its key is its tokens and the chain
of pages before, so equal prompts have equal chains. Pages without a sequence stay findable until the space is needed;
the least recently used page is evicted first::

    free ──allocate──► held by sequences ──free──► idle (findable)   uncached pages return to free at once
      ▲                     ▲                          │
      └────── evicted ──────┼──────────────────────────┤
                            └───── open_sequence ──────┘
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_ROOT = 0  # the empty chain; chain numbers are unique, so that equal numbers mean equal tokens
ChainKey = tuple[int, tuple[int, ...]]


@dataclass(slots=True)
class _Holding:
    """The pages of one sequence in order, and the chain numbers of its cached full pages."""

    pages: array[int] = field(default_factory=lambda: array("i"))  # native code reads the array in place
    chains: list[int] = field(default_factory=list)


class BlockPool:
    """The pages of one model's cache, shared by reference count.

    Args:
        num_pages: total number of pages.
        page_size: positions per page.
        prefix_caching: whether full pages are kept for reuse.
    """

    def __init__(self, num_pages: int, page_size: int = 16, prefix_caching: bool = True) -> None:
        self.num_pages, self.page_size, self.prefix_caching = num_pages, page_size, prefix_caching
        self._free: dict[int, None] = dict.fromkeys(reversed(range(num_pages)))  # the last one is taken first
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references: dict[int, int] = {}
        self._holdings: dict[str, _Holding] = {}
        self._page_of: dict[ChainKey, int] = {}
        self._key_of: dict[int, ChainKey] = {}
        self._chain_of: dict[ChainKey, int] = {}
        self._next_chain = _ROOT + 1

    @property
    def capacity(self) -> int:
        """Number of tokens that fit in the cache."""
        return self.num_pages * self.page_size

    @property
    def usage(self) -> float:
        """Share of the pages that sequences hold, 0 to 1."""
        return len(self._references) / self.num_pages if self.num_pages else 1.0

    def table(self, id: str) -> array[int]:
        """Return the pages of a sequence in order, int32. The array is live: do not modify the array."""
        return self._holdings[id].pages

    def open_sequence(self, id: str, tokens: Sequence[int]) -> int:
        """Open a sequence; return the number of leading ``tokens`` in the cache, at most ``len(tokens) - 1``."""
        holding = self._holdings[id] = _Holding()
        if not self.prefix_caching:
            return 0
        chain, size = _ROOT, self.page_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            key = (chain, tuple(tokens[start : start + size]))
            page = self._page_of.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._references[page] = self._references.get(page, 0) + 1
            chain = self._chain_of[key]
            holding.pages.append(page)
            holding.chains.append(chain)
        return len(holding.pages) * size

    def can_allocate(self, lengths: Iterable[tuple[str, int]]) -> bool:
        """Whether ``allocate`` would find room for every ``(id, length)``, one after the other; changes nothing."""
        missing = 0
        for id, length in lengths:
            held = self._holdings.get(id)
            missing += max(0, -(-length // self.page_size) - (0 if held is None else len(held.pages)))
        return missing <= len(self._free) + len(self._idle)

    def allocate(self, id: str, length: int) -> bool:
        """Reserve pages for ``length`` tokens of sequence ``id``; return False, unchanged, if pages are missing."""
        holding = self._holdings.get(id)
        if holding is None:
            holding = self._holdings[id] = _Holding()
        missing = -(-length // self.page_size) - len(holding.pages)
        if missing > len(self._free) + len(self._idle):
            return False
        for _ in range(missing):
            page = self._take(holding.pages[-1] + 1 if holding.pages else None)
            self._references[page] = 1
            holding.pages.append(page)
        return True

    def cache_blocks(self, id: str, tokens: Sequence[int], computed: int) -> None:
        """Make the full pages of ``tokens[:computed]``, computed and committed, findable by their content."""
        holding, size = self._holdings[id], self.page_size
        if not self.prefix_caching:
            return
        for index in range(len(holding.chains), computed // size):
            parent = holding.chains[-1] if holding.chains else _ROOT
            key = (parent, tuple(tokens[index * size : (index + 1) * size]))
            chain = self._chain_of.get(key)
            if chain is None:  # else another sequence computed the same page first, and this page stays private
                chain, page = self._next_chain, holding.pages[index]
                self._next_chain += 1
                self._page_of[key], self._key_of[page], self._chain_of[key] = page, key, chain
            holding.chains.append(chain)

    def free(self, id: str) -> None:
        """Free a sequence's pages; its last pages are evicted first. Unknown ids are ignored."""
        holding = self._holdings.pop(id, None)
        for page in reversed(holding.pages if holding else ()):
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free[page] = None

    def forget_contents(self) -> None:
        """Make no page findable: the contents of all pages are lost."""
        for index in (self._page_of, self._key_of, self._chain_of):
            index.clear()
        self._free.update(self._idle)
        self._idle.clear()
        for holding in self._holdings.values():
            holding.chains.clear()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if a page is leaked, held twice by mistake or indexed under a wrong key."""
        held: dict[int, int] = {}
        for holding in self._holdings.values():
            assert len(set(holding.pages)) == len(holding.pages), "a sequence holds a page twice"
            assert len(holding.chains) <= len(holding.pages), "a sequence keeps more pages than it holds"
            for page in holding.pages:
                held[page] = held.get(page, 0) + 1
        assert held == self._references, "reference counts differ from what sequences hold"
        groups = (set(self._free), set(self._idle), set(held))
        assert sum(map(len, groups)) == self.num_pages == len(set.union(*groups)), "a page is leaked or in two places"
        assert self._page_of == {key: page for page, key in self._key_of.items()}, "the index is not one to one"
        assert self._page_of.keys() == self._chain_of.keys(), "a chain has no page"
        assert set(self._idle) <= set(self._key_of), "an idle page cannot be found"

    def _take(self, wanted: int | None) -> int:
        """Take a free page, preferably the page after the sequence's last, so that caches stay contiguous.

        Otherwise the latest freed page: the system clears the memory of a page at its first use, which takes time.
        """
        if wanted is not None and wanted in self._free:
            del self._free[wanted]
            return wanted
        if self._free:
            return self._free.popitem()[0]
        page, _ = self._idle.popitem(last=False)
        key = self._key_of.pop(page)
        del self._page_of[key], self._chain_of[key]
        return page
