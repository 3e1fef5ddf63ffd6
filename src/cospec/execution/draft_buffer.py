"""Drafts between drafting and verification: pending draft requests, and finished drafts that wait for the target.

Minions calls this buffer the intermediate resulting pool (section 3.4), CoSine the draft pool (section 4.3). Life of
an entry::

    add ──► pending ──deliver──► ready ──take──► verified
               └────── drop ──────┘  stale: the sequence took another path, so its draft is discarded

A draft continues the tokens of its ``DraftRequest``. The last ``assumed`` of these tokens were a draft under
verification at the time of the request. A draft after all outcomes (``DraftBudget.outcomes``) begins with these tokens
instead. ``rebase`` returns the part that still holds after the sequence has moved on. The result is exact: tokens that
decide whether a draft is kept were fixed before the kept tokens were drawn. A draft from before the latest verification
that does not reach beyond the verified tokens is never kept. So no token is verified twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cospec.core.plugin_base import base_of
from cospec.core.tree import depths
from cospec.core.types import AssumedTokens, Draft, DraftBudget, DraftContext, ScheduledRequest
from cospec.drafters.draft_subtrees import after, below, cut


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """One sequence as its drafter sees it; a copy that does not change while the drafter runs."""

    context: DraftContext
    budget: DraftBudget

    @property
    def id(self) -> str:
        return self.context.id

    @property
    def is_ahead(self) -> bool:
        """Whether the draft continues tokens that the target did not verify yet."""
        return bool(self.context.assumed) or self.budget.outcomes

    def is_valid(self, tokens: Sequence[int]) -> bool:
        """Return whether the requested draft can still continue ``tokens``, all of which are committed.

        The sequence gained nothing in the meantime, or all assumed tokens and at most one more. A window in flight that
        is not fully accepted refutes the draft. Only its tokens can refute a draft after all outcomes.
        """
        context, sure = self.context, self.context.committed_len
        gained = len(tokens) - sure
        if self.budget.outcomes:
            return gained >= 0
        if gained == 0 or context.assumed == 0:
            return gained == 0
        return context.assumed <= gained <= context.assumed + 1 and all(
            tokens[place] == context.tokens[place] for place in range(sure, len(context.tokens))
        )


def rebase(request: DraftRequest, draft: Draft, tokens: Sequence[int]) -> Draft | None:
    """Return the part of ``draft`` after ``tokens``; None if nothing is left or the sequence took another path."""
    base, known = base_of(request.context, request.budget), len(tokens)
    if draft.base_len != base or known < base or not request.is_valid(tokens) or not len(draft):
        return None
    if known == base:
        return None if request.budget.outcomes else draft  # the first tokens of the former are still in the target
    return after(draft, tokens[base:])


def fit_to_budget(draft: Draft | None, budget: DraftBudget) -> Draft | None:
    """Fit a draft to a later budget: cut a chain; cut a tree to its most probable nodes, or to its best path.

    A tree with q is dropped if it is too large: a choice among siblings that depends on what was drawn below them would
    select among drawn tokens.
    """
    if draft is None or budget.depth < 1 or budget.max_nodes < 1:
        return None
    fits = len(draft) <= budget.max_nodes and draft.depth <= budget.depth
    if fits and (draft.is_chain or draft.q is not None or not budget.is_chain):
        return draft
    if draft.is_chain:
        return cut(draft, range(min(budget.depth, budget.max_nodes)))
    if draft.q is not None:
        return None
    if budget.is_chain:
        kept = best_path(draft)[: budget.depth]
    else:
        levels = depths(draft.parents)
        allowed = [node for node in range(len(draft)) if levels[node] <= budget.depth]
        reach = _reach(draft)
        kept = sorted(sorted(allowed, key=lambda node: -reach[node])[: budget.max_nodes])
    return cut(draft, kept)


def without_unlikely(draft: Draft | None, threshold: float) -> Draft | None:
    """Return the nodes with a probability of acceptance of at least ``threshold``; None if there are none."""
    if draft is None or not threshold or draft.confidence is None:
        return draft
    kept = [node for node, chance in enumerate(_reach(draft)) if chance >= threshold]
    return cut(draft, kept) if kept else None


def _reach(draft: Draft) -> list[float]:
    """Return the probability of each node that it and all nodes above are accepted; never more than its parent's."""
    given = [0.5] * len(draft) if draft.confidence is None else draft.confidence.tolist()
    reach: list[float] = []
    for node, parent in enumerate(draft.parents):
        reach.append(given[node] * (reach[parent] if parent >= 0 else 1.0))
    return reach


def best_path(draft: Draft) -> list[int]:
    """Return the path with the most expected accepted tokens."""
    if draft.is_chain:
        return list(range(len(draft)))
    expected, following = _reach(draft), [-1] * (len(draft) + 1)
    best = [0.0] * (len(draft) + 1)  # below each node; of the root at the end
    for node in reversed(range(len(draft))):
        parent, value = draft.parents[node], expected[node] + best[node]
        if following[parent] < 0 or value >= best[parent]:
            best[parent], following[parent] = value, node
    path, node = [], following[-1]
    while node >= 0:
        path.append(node)
        node = following[node]
    return path


class DraftBuffer:
    """Every sequence has at most one entry: a pending request, or a finished draft (None: the drafter made no draft).

    Attributes:
        used: drafts made during verification that were used: after the likeliest outcome, where the whole draft was
            accepted, after another outcome, and for windows that were submitted during the verification.
    """

    def __init__(self) -> None:
        self.pending: dict[str, DraftRequest] = {}
        self.ready: dict[str, tuple[DraftRequest, Draft | None]] = {}
        self.used = {"likeliest": 0, "other": 0, "in flight": 0}
        self.stale = 0  # drafts that were discarded because their sequence took another path

    def add(self, requests: Iterable[DraftRequest]) -> None:
        """Add pending requests."""
        for request in requests:
            assert request.id not in self.pending and request.id not in self.ready, "a sequence has two drafts"
            self.pending[request.id] = request

    def deliver(self, requests: Sequence[DraftRequest], drafts: Iterable[Draft]) -> None:
        """Store a drafter's answer; omitted sequences have no draft. Answers to dropped requests are ignored."""
        found = {(draft.id, draft.base_len): draft for draft in drafts}
        for request in requests:
            draft = found.get((request.id, base_of(request.context, request.budget)))
            if self.pending.get(request.id) is not request:
                self.stale += 1
                continue
            del self.pending[request.id]
            # a failed draft ahead can still be drafted after the commit
            if draft is not None or not request.is_ahead:
                self.ready[request.id] = request, draft

    def drop_stale(self, entry: ScheduledRequest) -> None:
        """Drop a pending request or a draft that the sequence's new tokens have made stale."""
        sequence = entry.sequence
        request = self.pending.get(sequence.id)
        if request is not None and not request.is_valid(sequence.tokens):
            del self.pending[sequence.id]
        pending, draft = self.ready.get(sequence.id, (None, None))
        if pending is not None and draft is not None and rebase(pending, draft, sequence.tokens) is None:
            del self.ready[sequence.id]
            self.stale += 1

    def take(self, entry: ScheduledRequest) -> Draft | None:
        """Return the finished draft of a planned sequence, after its current tokens and within its current budget."""
        request, draft = self.ready.pop(entry.sequence.id, (None, None))
        if request is None or draft is None:
            return None
        rest = rebase(request, draft, entry.sequence.tokens)
        if request.budget.outcomes:  # guesses of the outcome may be unlikely, what follows may not
            rest = without_unlikely(rest, entry.budget.threshold)
        fitting = fit_to_budget(rest, entry.budget)
        if fitting is not None and request.is_ahead:
            assumed = request.context.assumed
            whole = assumed > 0 and len(entry.sequence.tokens) > len(request.context.tokens)
            self.used["likeliest" if whole else "other"] += 1
        return fitting

    def take_window(self, entry: ScheduledRequest, request: DraftRequest) -> tuple[AssumedTokens, Draft] | None:
        """Return the next window of a sequence in flight: its assumed tokens, and the draft after these.

        The first token of the finished draft is the guess of the token after the windows before. None where ``request``
        has no such chain; then what was drafted stays.
        """
        found, draft = self.ready.get(request.id, (None, None))
        if found is not request or draft is None or len(draft) < 2 or not draft.is_chain:
            return None
        known = len(entry.sequence.tokens)
        assumed = AssumedTokens(known, (*request.context.tokens[known:], draft.tokens[0]))
        fitting = fit_to_budget(below(draft, 0, assumed.end), entry.budget)
        if fitting is None:
            return None
        del self.ready[request.id]
        self.used["in flight"] += 1
        return assumed, fitting

    def drop(self, ids: Iterable[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        for id in ids:
            self.pending.pop(id, None)
            self.ready.pop(id, None)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if a sequence has two entries or another id."""
        assert not self.pending.keys() & self.ready.keys(), "a sequence is pending and ready at once"
        for id, request in self.pending.items():
            assert request.id == id, "a request has another id"
        for id, (request, draft) in self.ready.items():
            assert request.id == id and (draft is None or draft.id == id), "a draft has another id"
