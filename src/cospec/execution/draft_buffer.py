"""Drafts between drafting and verification: who is being drafted for, and which drafts wait for the target.

Minions calls it the intermediate resulting pool (section 3.4), CoSine the draft pool (section 4.3). Life of an entry::

    expect ──► asked ──deliver──► ready ──take──► verified
                 └─────── drop ─────┘  stale: the sequence went another way, so what comes is thrown away

A draft says which tokens it continues: those of its ``DraftRequest``, the last ``assumed`` of which were a draft under
verification when it was asked for. ``continued`` decides what of it still holds when the sequence has moved on. That is
exact: whether a draft is kept depends on tokens that were fixed before the kept ones were drawn, and a draft from
before the latest judgement that did not reach beyond it is never kept, so that no token is judged twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cospec.core.types import Draft, DraftBudget, DraftContext, ScheduledRequest


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """One sequence as its drafter sees it, in a copy that does not change while the drafter works."""

    context: DraftContext
    budget: DraftBudget

    @property
    def id(self) -> str:
        return self.context.id

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens``, all committed by now, can still be continued by what was asked for.

        A sequence is judged at most once on the way: it has gained nothing, or what was assumed and one token at most
        behind it.
        """
        context, sure = self.context, self.context.committed
        gained = len(tokens) - sure
        if gained == 0 or context.assumed == 0:
            return gained == 0
        return context.assumed <= gained <= context.assumed + 1 and all(
            tokens[place] == context.tokens[place] for place in range(sure, len(context.tokens))
        )


def continued(ask: DraftRequest, draft: Draft, tokens: Sequence[int]) -> Draft | None:
    """The part of ``draft`` behind ``tokens``, as a draft of its own; None where nothing is left or it went astray."""
    base, known = len(ask.context.tokens), len(tokens)
    if draft.base_len != base or known < base or not ask.holds(tokens) or not len(draft):
        return None
    if known == base:
        return draft
    # One token stands behind what was assumed; a chain goes on if it began with that token.
    if not draft.is_chain or draft.tokens[0] != tokens[base] or len(draft) == 1:
        return None
    return _cut(draft, slice(1, None), known)


def fitted(draft: Draft | None, budget: DraftBudget) -> Draft | None:
    """The draft within a budget that was set after it was asked for: a chain is cut, a tree that is too large left."""
    if draft is None or budget.depth < 1:
        return None
    if len(draft) <= budget.max_nodes and draft.depth <= budget.depth:
        return draft
    if not draft.is_chain:
        return None
    return _cut(draft, slice(0, min(budget.depth, budget.max_nodes)), draft.base_len)


def _cut(draft: Draft, kept: slice, base: int) -> Draft | None:
    """Some nodes of a chain as a chain behind ``base`` committed tokens."""
    tokens = draft.tokens[kept]
    if not tokens:
        return None
    return replace(
        draft,
        base_len=base,
        tokens=tokens,
        parents=tuple(range(-1, len(tokens) - 1)),
        drafters=draft.drafters[kept],
        q=None if draft.q is None else draft.q[kept],
        confidence=None if draft.confidence is None else draft.confidence[kept],
    )


class DraftBuffer:
    """Every sequence is in at most one place: being drafted for, or with a finished draft (None: there is none)."""

    def __init__(self) -> None:
        self.asked: dict[str, DraftRequest] = {}
        self.ready: dict[str, tuple[DraftRequest, Draft | None]] = {}
        self.stale = 0  # drafts that came to nothing because their sequence went another way

    def expect(self, asks: Iterable[DraftRequest]) -> None:
        """Somebody drafts for these sequences now."""
        for ask in asks:
            assert ask.id not in self.asked and ask.id not in self.ready, "a sequence is drafted for twice"
            self.asked[ask.id] = ask

    def deliver(self, asks: Sequence[DraftRequest], drafts: Iterable[Draft]) -> None:
        """What a drafter answered; sequences that it left out have no draft. Answers to dropped asks are ignored."""
        found = {draft.id: draft for draft in drafts}
        for ask in asks:
            if self.asked.get(ask.id) is not ask:
                self.stale += 1
                continue
            del self.asked[ask.id]
            draft = found.get(ask.id)
            if draft is not None or not ask.context.assumed:  # what could not be drafted ahead may be drafted yet
                self.ready[ask.id] = ask, draft

    def review(self, entry: ScheduledRequest) -> None:
        """Drop what the sequence's new tokens have overtaken."""
        sequence = entry.sequence
        ask = self.asked.get(sequence.id)
        if ask is not None and not ask.holds(sequence.tokens):
            del self.asked[sequence.id]
        asked, draft = self.ready.get(sequence.id, (None, None))
        if asked is not None and draft is not None and continued(asked, draft, sequence.tokens) is None:
            del self.ready[sequence.id]
            self.stale += 1

    def take(self, entry: ScheduledRequest) -> Draft | None:
        """The finished draft of a planned sequence, behind its present tokens and within its present budget."""
        ask, draft = self.ready.pop(entry.sequence.id, (None, None))
        if ask is None or draft is None:
            return None
        return fitted(continued(ask, draft, entry.sequence.tokens), entry.budget)

    def drop(self, ids: Iterable[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        for id in ids:
            self.asked.pop(id, None)
            self.ready.pop(id, None)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a sequence is in two places or under another's name."""
        assert not self.asked.keys() & self.ready.keys(), "a sequence is drafted for while its draft waits"
        for id, ask in self.asked.items():
            assert ask.id == id, "an ask stands under another name"
        for id, (ask, draft) in self.ready.items():
            assert ask.id == id and (draft is None or draft.id == id), "a draft stands under another name"
