"""Keeps a drafter's cache on the tokens that the target commits.

Whatever is known of a sequence and not in the cache (the prompt, the recovered or bonus token, what was committed while
the drafter was not asked) is its backlog, fed at the front of the next proposal. Draft tokens lie behind the known ones
until the commit says which of them came to be: those stay, moved together where they are a path of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from torch import Tensor

from cospec.batches import Segment, TokenBatch
from cospec.drafters.branching import room
from cospec.protocols import Model, Vocabulary
from cospec.types import Budget, Commit, Context

CATCH_UP_TOKENS = 2048  # fed in one forward; longer backlogs are fed in pieces so that memory stays bounded


@dataclass(slots=True)
class Ahead:
    """What lies in the cache behind the committed tokens: tokens in the target's ids and the tree that they form."""

    base: int  # committed tokens before
    start: int  # cache entries before
    tokens: Seq[int] = ()
    parents: Seq[int] = ()

    def path(self, tokens: Seq[int]) -> list[int]:
        """The nodes that became ``tokens``, from the front on."""
        path: list[int] = []
        for token in tokens:
            above = path[-1] if path else -1
            found = (n for n, at in enumerate(self.parents) if at == above and self.tokens[n] == token)
            node = next(found, None)
            if node is None:
                break
            path.append(node)
        return path


@dataclass(slots=True)
class _Place:
    """How far one sequence is: its known tokens in the drafter's ids, how many of them the cache holds."""

    own: Seq[int] = ()
    fed: int = 0
    ahead: Ahead | None = field(default=None)


class Follower:
    """The cache of one model and the sequences in it."""

    def __init__(self, model: Model, vocabulary: Vocabulary) -> None:
        self.model, self.vocabulary = model, vocabulary
        self._places: dict[str, _Place] = {}

    def open(self, context: Context, budget: Budget) -> Budget | None:
        """Make room for a draft: the budget as far as the model's context allows it, None when there is no room."""
        read = self.vocabulary.read(context)
        if read is None:
            return None
        own, agreed = read
        depth = min(budget.depth, budget.max_nodes, self.model.max_len - len(own))
        if depth < 1:
            return None
        nodes = depth if budget.is_chain else budget.max_nodes
        place = self._places.get(context.id)
        if place is None:
            attached = self.model.pages.attach(context.id, own[: len(own) - context.assumed])
            place = self._places[context.id] = _Place(fed=attached)
        fitting = budget
        if (depth, nodes) != (budget.depth, budget.max_nodes):
            fitting = replace(budget, depth=depth, max_nodes=nodes)
        if not self.model.pages.reserve(context.id, len(own) + room(fitting)):
            self.free([context.id])  # no room: this sequence goes without drafts until there is
            return None
        place.own, place.fed = own, min(place.fed, agreed)
        return fitting

    def lend(self, id: str, tokens: Seq[int], ahead: int) -> int | None:
        """For somebody who feeds the model himself: room for ``ahead`` tokens behind the known ones.

        Returns how many of them the cache holds, all but the last at most; None where there is no room.
        """
        known, pages = len(tokens), self.model.pages
        place = self._places.get(id)
        if place is None:
            place = self._places[id] = _Place(fed=pages.attach(id, tokens))
        if known + ahead > self.model.max_len or not pages.reserve(id, known + ahead):
            return None
        place.own, place.fed, place.ahead = tokens, min(place.fed, known - 1), None
        pages.keep(id, tokens, place.fed)
        return place.fed

    def take_back(self, id: str, fed: int) -> None:
        """So many known tokens are in the cache by now, those that came to be since among them."""
        self._places[id].fed = fed

    def stretch(self, id: str, nodes: int) -> bool:
        """Make room for so many nodes behind the known tokens of an opened sequence; False where there is none."""
        length = self.known(id) + nodes
        return length <= self.model.max_len and self.model.pages.reserve(id, length)

    def known(self, id: str) -> int:
        """Cache entries of an opened sequence's known tokens."""
        return len(self._places[id].own)

    def behind(self, contexts: Seq[Context]) -> Tensor:
        """Feed the backlog; rows ``[S, V]`` over the target's ids behind the known tokens."""
        logits = self.model.forward(self.backlog(contexts))
        return self.vocabulary.behind([self._places[context.id].own for context in contexts], logits)

    def backlog(self, contexts: Seq[Context]) -> TokenBatch:
        """Every known token that is not in the cache, as one batch that asks for the rows that ``behind`` wants."""
        segments: list[Segment] = []
        for context in contexts:
            place = self._places[context.id]
            rows, known = min(self.vocabulary.rows, len(place.own)), len(place.own)
            start = min(place.fed, known - rows)
            while known - start > CATCH_UP_TOKENS:
                piece = tuple(place.own[start : start + CATCH_UP_TOKENS])
                self.model.forward(TokenBatch((Segment(context.id, start, piece, logits_from=len(piece)),)))
                start += CATCH_UP_TOKENS
            tokens = tuple(place.own[start:known])
            segments.append(Segment(context.id, start, tokens, logits_from=len(tokens) - rows))
        return TokenBatch(tuple(segments))

    def keep(self, context: Context, tokens: Seq[int], parents: Seq[int]) -> None:
        """The backlog was fed, and these nodes behind it; assumed tokens count as draft tokens before them."""
        place, assumed = self._places[context.id], context.assumed
        place.fed = len(place.own) - assumed
        self.model.pages.keep(context.id, place.own, min(place.fed, self.vocabulary.settled(context)))
        shifted = [*range(-1, assumed - 1), *(parent + assumed for parent in parents)]
        place.ahead = Ahead(context.committed, place.fed, [*context.tokens[context.committed :], *tokens], shifted)

    def extend(self, id: str, token: int) -> int:
        """One more token is fed behind those kept, which form a chain; returns its cache entry."""
        place = self._places[id]
        assert place.ahead is not None, "extended before anything was kept"
        ahead = place.ahead
        place.ahead = Ahead(ahead.base, ahead.start, [*ahead.tokens, token], [*ahead.parents, len(ahead.tokens) - 1])
        return ahead.start + len(ahead.tokens)

    def commit(self, commits: Seq[Commit]) -> None:
        """Keep what was fed and turned out committed; the rest is overwritten by the next proposal."""
        moved = []
        for commit in commits:
            place = self._places.get(commit.id)
            ahead = place.ahead if place else None
            if place is None or ahead is None:
                continue
            place.ahead = None
            if ahead.base != commit.base_len:
                continue
            path = ahead.path(commit.tokens)
            place.fed = ahead.start + len(path)
            if path != list(range(len(path))):
                moved.append(Commit(commit.id, ahead.start, commit.tokens[: len(path)], tuple(path), place.fed))
        if moved:
            self.model.commit(moved)

    def free(self, ids: Seq[str]) -> None:
        """Forget sequences and give back their cache."""
        for id in ids:
            self._places.pop(id, None)
        self.vocabulary.free(ids)
        self.model.free(ids)
