"""Drafts between drafting and verification: pending draft requests, and finished drafts that wait for the target.

Minions calls this buffer the intermediate resulting pool (section 3.4), CoSine the draft pool (section 4.3). Life of
an entry::

    add ──► pending ──deliver──► ready ──take──► verified
               └────── drop ──────┘  stale: the sequence took another path, so its draft is discarded

A draft continues the tokens of its ``DraftRequest``. The last ``assumed`` of these tokens were a draft under
verification at the time of the request. ``rebase`` returns the part that still holds after the sequence has moved on.
The result is exact: tokens that decide whether a draft is kept were fixed before the kept tokens were drawn. A draft
from before the latest verification that does not reach beyond the verified tokens is never kept. So no token is
verified twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cospec.core.tree import chain, children
from cospec.core.types import AssumedTokens, Draft, DraftBudget, DraftContext, RequestState, ScheduledRequest


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """One sequence as its drafter sees it; a copy that does not change while the drafter runs.

    Attributes:
        rank: place among the outcomes of the sequence's verification, the likeliest is 0.
    """

    context: DraftContext
    budget: DraftBudget
    rank: int = 0

    @property
    def id(self) -> str:
        return self.context.id

    def is_valid(self, tokens: Sequence[int]) -> bool:
        """Return whether the requested draft can still continue ``tokens``, all of which are committed.

        The sequence gained nothing in the meantime, or all assumed tokens and at most one more. A window in flight that
        is not fully accepted refutes the draft. Another outcome than the likeliest may assume no token.
        """
        context, sure = self.context, self.context.committed_len
        gained = len(tokens) - sure
        if gained == 0 or (context.assumed == 0 and not self.rank):
            return gained == 0
        return context.assumed <= gained <= context.assumed + 1 and all(
            tokens[place] == context.tokens[place] for place in range(sure, len(context.tokens))
        )


def rebase(request: DraftRequest, draft: Draft, tokens: Sequence[int]) -> Draft | None:
    """Return the part of ``draft`` after ``tokens``; None if nothing is left or the sequence took another path."""
    base, known = len(request.context.tokens), len(tokens)
    if draft.base_len != base or known < base or not request.is_valid(tokens) or not len(draft):
        return None
    if known == base:
        return draft
    # One committed token follows the assumed ones; what follows this token in the draft still holds.
    first = next((node for node in children(draft.parents, -1) if draft.tokens[node] == tokens[base]), None)
    return None if first is None else _below(draft, first, known)


def _below(draft: Draft, top: int, base: int) -> Draft | None:
    """Return the nodes below ``top`` as a draft after ``base`` committed tokens; None if there are none."""
    place = {top: -1}
    for node, parent in enumerate(draft.parents):
        if parent in place:
            place[node] = len(place) - 1
    del place[top]
    kept = list(place)
    return _some(draft, kept, tuple(place.get(draft.parents[node], -1) for node in kept), base) if kept else None


def fit_to_budget(draft: Draft | None, budget: DraftBudget) -> Draft | None:
    """Fit a draft to a later budget: cut a chain, drop a tree that is too large."""
    if draft is None or budget.depth < 1:
        return None
    if len(draft) <= budget.max_nodes and draft.depth <= budget.depth:
        return draft
    if not draft.is_chain:
        return None
    kept = range(min(budget.depth, budget.max_nodes))
    return _some(draft, kept, chain(len(kept)), draft.base_len)


def _some(draft: Draft, kept: Sequence[int], parents: tuple[int, ...], base: int) -> Draft:
    """Return the nodes ``kept`` of a draft with their new ``parents``, after ``base`` committed tokens."""
    return replace(
        draft,
        base_len=base,
        tokens=tuple(draft.tokens[node] for node in kept),
        parents=parents,
        drafters=tuple(draft.drafters[node] for node in kept),
        q=None if draft.q is None else draft.q[list(kept)],
        confidence=None if draft.confidence is None else draft.confidence[list(kept)],
    )


class DraftBuffer:
    """Every sequence has at most one entry: a pending request, or a finished draft (None: the drafter made no draft).

    Requests after other outcomes of the sequence's verification wait besides. When the entry is stale, the request or
    draft whose outcome has come true takes its place.

    Attributes:
        used: drafts made during verification that were used: after the likeliest outcome, after another outcome, and
            for windows that were submitted during the verification.
    """

    def __init__(self) -> None:
        self.pending: dict[str, DraftRequest] = {}
        self.ready: dict[str, tuple[DraftRequest, Draft | None]] = {}
        self.used = {"likeliest": 0, "other": 0, "in flight": 0}
        self._others: dict[str, dict[DraftRequest, Draft | None]] = {}  # None: not there yet
        self.stale = 0  # drafts that were discarded because their sequence took another path

    def add(self, requests: Iterable[DraftRequest]) -> None:
        """Add pending requests."""
        for request in requests:
            if request.rank:
                self._others.setdefault(request.id, {})[request] = None
                continue
            assert request.id not in self.pending and request.id not in self.ready, "a sequence has two drafts"
            self.pending[request.id] = request

    def deliver(self, requests: Sequence[DraftRequest], drafts: Iterable[Draft]) -> None:
        """Store a drafter's answer; omitted sequences have no draft. Answers to dropped requests are ignored."""
        found = {(draft.id, draft.base_len): draft for draft in drafts}
        for request in requests:
            draft = found.get((request.id, len(request.context.tokens)))
            others = self._others.get(request.id, {})
            if request in others:
                others[request] = draft
                if draft is None:
                    del others[request]
                continue
            if self.pending.get(request.id) is not request:
                self.stale += not request.rank
                continue
            del self.pending[request.id]
            # a failed draft ahead can still be drafted after the commit
            if draft is not None or not request.context.assumed + request.rank:
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
        if sequence.id not in self.pending and sequence.id not in self.ready:
            self._promote(sequence)

    def take(self, entry: ScheduledRequest) -> Draft | None:
        """Return the finished draft of a planned sequence, after its current tokens and within its current budget."""
        self._others.pop(entry.sequence.id, None)
        request, draft = self.ready.pop(entry.sequence.id, (None, None))
        if request is None or draft is None:
            return None
        fitting = fit_to_budget(rebase(request, draft, entry.sequence.tokens), entry.budget)
        if fitting is not None and request.context.assumed + request.rank:
            self.used["other" if request.rank else "likeliest"] += 1
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
        fitting = fit_to_budget(_below(draft, 0, assumed.end), entry.budget)
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
            self._others.pop(id, None)

    def _promote(self, sequence: RequestState) -> None:
        """Keep what was requested for the outcome that has come true."""
        for request, draft in self._others.pop(sequence.id, {}).items():
            if len(sequence.tokens) <= len(request.context.tokens) or not request.is_valid(sequence.tokens):
                continue
            if draft is None:
                self.pending[sequence.id] = request
            elif rebase(request, draft, sequence.tokens) is not None:
                self.ready[sequence.id] = request, draft

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if a sequence has two entries or another id."""
        assert not self.pending.keys() & self.ready.keys(), "a sequence is pending and ready at once"
        for id, request in self.pending.items():
            assert request.id == id, "a request has another id"
        for id, (request, draft) in self.ready.items():
            assert request.id == id and (draft is None or draft.id == id), "a draft has another id"
