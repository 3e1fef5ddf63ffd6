"""Copy the tokens that followed the same suffix before, by a suffix automaton with counts.

Each sequence has an automaton of its prompt and output. Outputs of finished sequences go into a shared automaton, so
earlier answers help later requests. Its memory is bounded by two halves: responses are added to the younger of two
automata. When the younger holds half of the allowed tokens, the older is dropped and a new automaton begins.

The longest known suffix of the sequence is looked up in all three; the longest match drafts. The continuations after
the suffix get probabilities by frequency. Tokens are chosen, not drawn: a point mass.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.tree import MAX_NODES
from cospec.core.types import Commit, DraftBudget
from cospec.drafters.interfaces import DrafterBuildContext
from cospec.drafters.lookup import NO_NODES, LookupDrafter, LookupNodes, LookupText
from cospec.native import lookups
from cospec.plugin_options import Options

LONGEST = 32  # maximum length of a counted suffix
ROOT = 0


class SuffixOptions(Options):
    """Options of ``suffix``.

    Attributes:
        suffix_max_cached_tokens: stored tokens of finished responses, about 1 KB each; 0 stores none.
        suffix_min_match: tokens of the shortest suffix that is continued.
    """

    suffix_max_cached_tokens: int = Field(default=65536, ge=0)
    suffix_min_match: int = Field(default=1, ge=1, le=LONGEST)


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """A matched suffix of ``length`` tokens: the automaton's state after it."""

    automaton: SuffixAutomaton
    state: int
    length: int


class SuffixAutomaton:
    """All substrings of a growing text, with counts of those up to ``LONGEST`` tokens.

    A state stands for substrings with the same end positions; its link leads to their longest suffix with more end
    positions. Adding a token takes amortised constant time for the states, and up to ``LONGEST`` steps for the counts.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]
        self.size = 0
        self._last = ROOT
        self._recent, self._reach = ROOT, 0  # the state of the last LONGEST tokens, and their number

    def add(self, token: int) -> None:
        """Append one token."""
        self.size += 1
        at = self._last
        if token in self.next[at]:  # only after ``cut``: the text so far is a substring with another continuation
            self._last = self._split(at, token)
        else:
            self._last = new = self._state(self.length[at] + 1, {}, ROOT)
            while at >= 0 and token not in self.next[at]:
                self.next[at][token] = new
                at = self.link[at]
            if at >= 0:
                self.link[new] = self._split(at, token)
        self._note(token)

    def cut(self) -> None:
        """Begin another text: no substring crosses this position."""
        self._last, self._recent, self._reach = ROOT, ROOT, 0

    def own_match(self) -> SuffixMatch:
        """Return the longest suffix of the text itself that occurred earlier."""
        state = self._recent
        length = self._reach
        while state > ROOT and self.count[state] < 2:
            state = self.link[state]
            length = self.length[state]
        return SuffixMatch(self, max(state, ROOT), min(length, LONGEST))

    def match(self, tokens: Sequence[int]) -> SuffixMatch:
        """Return the longest suffix of ``tokens`` that occurs in the text."""
        state, length = ROOT, 0
        for token in tokens[-LONGEST:]:
            while state != ROOT and token not in self.next[state]:
                state = self.link[state]
                length = self.length[state]
            if token in self.next[state]:
                state, length = self.next[state][token], length + 1
        return SuffixMatch(self, state, length)

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        """Return continuations ``(token, count, next state)``, most frequent first, newest first on ties."""
        found = [(token, self.count[after], after) for token, after in reversed(self.next[state].items())]
        return sorted((each for each in found if each[1]), key=lambda each: -each[1])

    def _state(self, length: int, following: dict[int, int], link: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(0)
        return len(self.next) - 1

    def _split(self, at: int, token: int) -> int:
        """Return the state of exactly the substrings of ``at`` followed by ``token``; the other substrings get a new
        state.
        """
        whole = self.next[at][token]
        if self.length[whole] == self.length[at] + 1:
            return whole
        part = self._state(self.length[at] + 1, dict(self.next[whole]), self.link[whole])
        self.count[part] = self.count[whole]
        self.link[whole] = part
        while at >= 0 and self.next[at].get(token) == whole:
            self.next[at][token] = part
            at = self.link[at]
        return part

    def _note(self, token: int) -> None:
        """Count the substrings that end here, up to ``LONGEST`` tokens long."""
        self._recent, self._reach = self.next[self._recent][token], self._reach + 1
        self._reach = min(self._reach, LONGEST)
        while self.link[self._recent] >= 0 and self.length[self.link[self._recent]] >= self._reach:
            self._recent = self.link[self._recent]
        state = self._recent
        while state > ROOT:
            self.count[state] += 1
            state = self.link[state]


class SharedResponses:
    """Finished responses in two automata; the older is dropped when the younger is full.

    Args:
        max_tokens: stored tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self._half = max_tokens // 2
        self._older, self._younger = SuffixAutomaton(), SuffixAutomaton()

    def new_text(self, prompt_len: int, min_match: int) -> SuffixText:
        """Return an empty text that also looks up its end in the responses."""
        return SuffixText(prompt_len, self, min_match)

    def add(self, text: LookupText, first: int, end: int) -> None:
        """Store the tokens ``[first, end)`` of a text; a response longer than half of the memory loses its front."""
        assert isinstance(text, SuffixText), "texts come from ``new_text``"
        for token in text.tokens[max(first, end - self._half) : end]:
            self._younger.add(token)
        self._younger.cut()
        if self._younger.size >= self._half:
            self._older, self._younger = self._younger, SuffixAutomaton()

    @property
    def size(self) -> int:
        """Number of stored tokens, always less than ``1.5`` times the limit."""
        return self._older.size + self._younger.size

    def matches(self, tokens: Sequence[int]) -> Iterator[SuffixMatch]:
        """Yield the match in the younger half, then in the older."""
        for automaton in (self._younger, self._older):
            if automaton.size:
                yield automaton.match(tokens)


class SuffixText:
    """One sequence's known tokens and their automaton. Implements ``LookupText``; takes no assumed tokens."""

    address = 0

    def __init__(self, prompt_len: int, responses: SharedResponses, min_match: int) -> None:
        self.prompt_len = prompt_len
        self.tokens: list[int] = []
        self._automaton = SuffixAutomaton()
        self._responses, self._min_match = responses, min_match

    @property
    def size(self) -> int:
        """See ``LookupText``."""
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """See ``LookupText``."""
        for token in tokens:
            self.tokens.append(token)
            self._automaton.add(token)

    def propose(self, assumed: Sequence[int], budget: DraftBudget) -> LookupNodes:
        """See ``LookupText``: the most probable nodes after the longest match, by the product of their confidences."""
        tail = self.tokens[-LONGEST:]
        match = max([self._automaton.own_match(), *self._responses.matches(tail)], key=lambda each: each.length)
        if match.length < self._min_match:
            return NO_NODES
        nodes: list[tuple[int, int, float]] = []  # token, parent, confidence
        waiting = list(_children(match, -1, 0, 1.0, budget))
        heapq.heapify(waiting)
        most = min(budget.max_nodes, MAX_NODES)
        while waiting and len(nodes) < most:
            value, _, depth, parent, token, confidence, state = heapq.heappop(waiting)
            nodes.append((token, parent, confidence))
            if depth < budget.depth:
                extended = SuffixMatch(match.automaton, state, match.length + depth)
                for child in _children(extended, len(nodes) - 1, depth, -value, budget):
                    heapq.heappush(waiting, child)
        tokens, parents = tuple([node[0] for node in nodes]), tuple([node[1] for node in nodes])
        return LookupNodes(tokens, parents, [node[2] for node in nodes])


class SuffixDrafter(LookupDrafter):
    """Drafts by suffix lookup."""

    drafts_ahead = False
    learns = True
    drafts_natively = True
    capabilities = DrafterCapabilities(costless=True, trees=True)
    Options: ClassVar[type[SuffixOptions]] = SuffixOptions

    def __init__(self, memory: int = 65536, shortest: int = 1, name: str = "suffix", native: bool = False) -> None:
        self._memory, self._shortest = memory, shortest
        super().__init__(name, native)

    @classmethod
    def build(cls, options: SuffixOptions, build_context: DrafterBuildContext) -> SuffixDrafter:
        """Build the drafter."""
        made = cls(options.suffix_max_cached_tokens, options.suffix_min_match)
        made.use_library(build_context.native)
        return made

    def use_library(self, allowed: bool) -> None:
        """See ``LookupDrafter``."""
        super().use_library(allowed)
        self._responses = (lookups.NativeResponses if self.native else SharedResponses)(self._memory)

    def new_text(self, prompt_len: int) -> LookupText:
        """See ``LookupDrafter``."""
        return self._responses.new_text(prompt_len, self._shortest)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Extend the texts; store the responses of finished sequences."""
        for commit in commits:
            text = self.texts.get(commit.id)
            if text is None or text.size < commit.base_len:
                continue
            end = commit.base_len + len(commit.tokens)
            if text.size < end:
                text.extend(commit.tokens[text.size - commit.base_len :])
            if commit.finish is not None:  # a native call may have read tokens after the end
                self._responses.add(text, text.prompt_len, end)


_Node = tuple[float, int, int, int, int, float, int]
"""Minus the product of confidences, rank among siblings, depth, parent, token, confidence, state."""


def _children(match: SuffixMatch, parent: int, depth: int, above: float, budget: DraftBudget) -> Iterator[_Node]:
    """Yield the continuations of node ``parent`` at ``depth``; a single child for a chain.

    The confidence in a continuation's frequency grows with the length of the match. After one token that occurred once
    before, the next token is uncertain.
    """
    width = MAX_NODES if budget.max_nodes > budget.depth else 1
    width = budget.widths[depth] if depth < len(budget.widths) else width
    found = match.automaton.followers(match.state)
    total = sum(count for _, count, _ in found)
    for rank, (token, count, state) in enumerate(found[:width]):
        confidence = count / total * match.length / (match.length + 1)
        if above * confidence >= budget.threshold:
            yield -above * confidence, rank, depth + 1, parent, token, confidence, state
