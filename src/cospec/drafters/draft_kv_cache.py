"""Keep a drafter's KV cache in step with the target's commits.

Known tokens that are not cached are the backlog: the prompt, the recovered or bonus token, and tokens committed without
a draft. The next proposal feeds the backlog first. Draft tokens follow the known tokens until the commit. Accepted
tokens stay, and are moved together if they are a path of a tree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.plugin_base import base_of
from cospec.core.types import Commit, DraftBudget, DraftContext
from cospec.drafters.dynamic_tree import room
from cospec.drafters.interfaces import VocabMapping

CATCH_UP_TOKENS = 2048  # tokens per forward; longer backlogs are fed in pieces to bound memory
LOOKBACK = 32  # maximum number of known tokens to score or to compare
MISSED = 3  # tokens of a backlog from which on the drafter missed a step


@dataclass(slots=True)
class UncommittedDraft:
    """Cached tokens after the committed tokens: tokens in the target's ids, and their tree."""

    base: int  # committed tokens before
    start: int  # cache entries before
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()

    def path(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes that became ``tokens``, from the front on."""
        own, parents, path, above = self.tokens, self.parents, list[int](), -1
        for token in tokens:
            for node in range(above + 1, len(own)):  # children come after their parent
                if parents[node] == above and own[node] == token:
                    break
            else:
                break
            path.append(node)
            above = node
        return path


@dataclass(slots=True)
class _CachedRequest:
    """One sequence.

    Attributes:
        own: its known tokens in the drafter's ids.
        fed: number of cached tokens.
        given: assumed tokens that the draft begins with, see ``DraftBudget.outcomes``.
    """

    own: Sequence[int] = ()
    fed: int = 0
    given: int = 0
    ahead: UncommittedDraft | None = field(default=None)


class DraftKVCache:
    """The cache of one model, and the sequences in it."""

    def __init__(self, model: Model, vocabulary: VocabMapping) -> None:
        self.model, self.vocabulary = model, vocabulary
        self._places: dict[str, _CachedRequest] = {}

    def open(self, context: DraftContext, budget: DraftBudget) -> DraftBudget | None:
        """Reserve room for a draft; returns the budget within the model's context, None without room."""
        read = self.vocabulary.tokens(context)
        if read is None:
            return None
        own, agreed = read
        depth = min(budget.depth, budget.max_nodes, self.model.max_len - len(own))
        if depth < 1:
            return None
        nodes = depth if budget.is_chain else budget.max_nodes
        place = self._places.get(context.id)
        if place is None:
            attached = self.model.pages.open_sequence(context.id, own[: len(own) - context.assumed])
            place = self._places[context.id] = _CachedRequest(fed=attached)
        fitting = budget
        if (depth, nodes) != (budget.depth, budget.max_nodes):
            fitting = replace(budget, depth=depth, max_nodes=nodes)
        if not self.model.pages.allocate(context.id, len(own) + room(fitting)):
            self.free([context.id])  # without room, this sequence gets no drafts
            return None
        place.own, place.fed = own, min(place.fed, agreed)
        place.given = len(context.tokens) - base_of(context, budget)
        return fitting

    def backlog_len(self, id: str, known: int) -> int:
        """How many of ``known`` tokens are not in the cache; all of them where the request was not seen yet."""
        place = self._places.get(id)
        return known - (0 if place is None else min(place.fed, known - 1))

    def reserve(self, id: str, tokens: Sequence[int], ahead: int) -> int | None:
        """Reserve room for ``ahead`` tokens after the known tokens, for a caller that runs the model directly.

        Returns the number of cached tokens, at most all but the last; None without room.
        """
        known, pages = len(tokens), self.model.pages
        place = self._places.get(id)
        if place is None:
            place = self._places[id] = _CachedRequest(fed=pages.open_sequence(id, tokens))
        if known + ahead > self.model.max_len or not pages.allocate(id, known + ahead):
            return None
        place.own, place.fed, place.ahead, place.given = tokens, min(place.fed, known - 1), None, 0
        pages.cache_blocks(id, tokens, place.fed)
        return place.fed

    def report_written(self, id: str, fed: int) -> None:
        """Record the number of cached known tokens, including tokens committed meanwhile."""
        self._places[id].fed = fed

    def stretch(self, id: str, nodes: int) -> bool:
        """Reserve room for ``nodes`` after the known tokens of an open sequence; False without room."""
        length = self.known(id) + nodes
        return length <= self.model.max_len and self.model.pages.allocate(id, length)

    def known(self, id: str) -> int:
        """Return the cache entries of an open sequence before its draft."""
        return len(self._places[id].own) - self._places[id].given

    def logits_after_known(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Feed the backlog; returns rows over the target's ids: one row ``[S, V]`` after the known tokens of each.

        A sequence whose draft begins with its assumed tokens has a row after each of these too, in their order.
        """
        logits = self.model.forward(self.backlog(contexts))
        return self.vocabulary.map_logits([self._places[context.id].own for context in contexts], logits)

    def backlog(self, contexts: Sequence[DraftContext], compared: Collection[str] = ()) -> TokenBatch:
        """Return all known tokens that are not cached as one batch, and mark the rows for ``logits_after_known``.

        Args:
            compared: sequences whose slices also get the rows before the latest output tokens, at most ``LOOKBACK``, if
                the drafter missed a step; for a drafter with the target's vocabulary.
        """
        slices: list[SequenceSlice] = []
        for context in contexts:
            place = self._places[context.id]
            rows, known = min(max(self.vocabulary.rows, 1 + place.given), len(place.own)), len(place.own)
            start = min(place.fed + self._cached_ahead(context), known - rows)
            while known - start > CATCH_UP_TOKENS:
                piece = tuple(place.own[start : min(start + CATCH_UP_TOKENS, known - rows)])
                self.model.forward(TokenBatch((SequenceSlice(context.id, start, piece, logits_from=len(piece)),)))
                start += len(piece)
            tokens = tuple(place.own[start:known])
            if context.id in compared and not context.assumed and known - start >= MISSED:
                rows = known - max(start, context.prompt_len - 1, known - 1 - LOOKBACK)
            slices.append(SequenceSlice(context.id, start, tokens, logits_from=len(tokens) - rows))
        return TokenBatch(tuple(slices))

    def _cached_ahead(self, context: DraftContext) -> int:
        """Return how many of the assumed tokens are in the cache, in their order: the draft of an earlier call."""
        place = self._places[context.id]
        ahead, sure = place.ahead, context.committed_len
        if not (self.vocabulary.same and context.assumed) or ahead is None:
            return 0
        if (ahead.base, ahead.start, place.fed) != (sure, sure, sure):
            return 0
        path = ahead.path(context.tokens[sure:])
        return next((at for at, node in enumerate(path) if node != at), len(path))

    def keep(self, context: DraftContext, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Record that the backlog and these nodes were fed; assumed tokens count as draft tokens before the nodes.

        The nodes of a draft that begins with the assumed tokens have these already.
        """
        place, assumed = self._places[context.id], context.assumed
        place.fed = len(place.own) - assumed
        self.model.pages.cache_blocks(context.id, place.own, min(place.fed, self.vocabulary.stable_len(context)))
        if assumed > place.given:
            parents = [*range(-1, assumed - 1), *[parent + assumed for parent in parents]]
            tokens = [*context.tokens[-assumed:], *tokens]
        place.ahead = UncommittedDraft(len(context.tokens) - assumed, place.fed, tokens, parents)

    def extend(self, id: str, tokens: Sequence[int]) -> int:
        """Record more fed tokens of a chain; returns the cache entry of the first one."""
        place = self._places[id]
        assert place.ahead is not None, "extended before anything was kept"
        ahead, count = place.ahead, len(place.ahead.tokens)
        place.ahead = UncommittedDraft(
            ahead.base,
            ahead.start,
            [*ahead.tokens, *tokens],
            [*ahead.parents, *range(count - 1, count - 1 + len(tokens))],
        )
        return ahead.start + count

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep fed tokens that were committed; the next proposal overwrites the rest."""
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
            if path and path[-1] >= len(path):  # not the first nodes
                moved.append(Commit(commit.id, ahead.start, commit.tokens[: len(path)], tuple(path), place.fed))
        if moved:
            self.model.commit(moved)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences and release their cache."""
        for id in ids:
            self._places.pop(id, None)
        self.vocabulary.free(ids)
        self.model.free(ids)
