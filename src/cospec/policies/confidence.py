"""Drafting stops where the drafter grows unsure, and what is not worth verifying is cut (SmartSpec, Algorithm 3).

The threshold ends a draft where the running product of its confidences, the chance that all of it so far is accepted,
falls below it. Then as much of each draft is verified as pays at the planned goodput.

Both cuts are made node by node, by confidences of that node and those above it, which are known before the node's token
is drawn. A cut that looked at what came behind would keep tokens by their own values, and bias the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from cospec.core.plugins import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.options import Options
from cospec.policies.context import PolicyContext
from cospec.policies.goodput.controller import Goodput, GoodputOptions


class ConfidenceOptions(Options):
    """Those of ``goodput``, and the running product below which drafting stops."""

    goodput: GoodputOptions = GoodputOptions()
    threshold: float = Field(default=0.3, ge=0, lt=1)


class Confidence(Policy):
    """Spec section 5, ``confidence``. Decides by goodput who is drafted for at all, and by confidence how far."""

    Options: ClassVar[type[ConfidenceOptions]] = ConfidenceOptions
    needs_latency: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    def __init__(self, goodput: Goodput, threshold: float, longest: int) -> None:
        self._goodput = goodput
        self._budget = DraftBudget(depth=longest, max_nodes=longest, threshold=threshold)
        self._load: BatchState | None = None

    @classmethod
    def build(cls, options: ConfidenceOptions, setting: PolicyContext) -> Confidence:
        """Around a goodput policy of its own."""
        return cls(Goodput.build(options.goodput, setting), options.threshold, setting.longest)

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """As deep as allowed, until the drafter grows unsure, for everybody whom a draft is expected to serve."""
        self._load = load
        planned, found = self._goodput.plan(load), []
        room = load.tokens - load.catching_up - len(load.ready) - sum(budget.max_nodes for budget in planned)
        for budget in planned:
            more = min(self._budget.depth - budget.depth, room)
            if budget.depth > 0 and not budget.widths and more >= 0:
                room -= more
                nodes = budget.depth + more
                budget = replace(self._budget, depth=nodes, max_nodes=nodes)
            found.append(budget)
        return found

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """The part of each draft whose tokens pay for their verification at the planned goodput."""
        if not drafts or self._load is None:
            return drafts
        bar = self._goodput.price(self._load)
        kept = (cut(draft, bar) for draft in drafts)
        return [draft for draft in kept if len(draft)]

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """As ``goodput``."""
        self._goodput.observe(stats, commits)

    def learn(self) -> None:
        """As ``goodput``."""
        self._goodput.learn()

    def gauges(self) -> Mapping[str, float]:
        """As ``goodput``."""
        return self._goodput.gauges()


def cut(draft: Draft, bar: float) -> Draft:
    """The nodes whose product of confidences from the root on is at least ``bar``; all where there are none."""
    if draft.confidence is None:
        return draft
    product, place = np.ones(len(draft)), {-1: -1}
    kept: list[int] = []
    for node, parent in enumerate(draft.parents):
        if parent in place:
            product[node] = draft.confidence[node] * (product[parent] if parent >= 0 else 1.0)
            if product[node] >= bar:
                place[node] = len(kept)
                kept.append(node)
    if len(kept) == len(draft):
        return draft
    return replace(
        draft,
        tokens=tuple(draft.tokens[node] for node in kept),
        parents=tuple(place[draft.parents[node]] for node in kept),
        drafters=tuple(draft.drafters[node] for node in kept),
        q=None if draft.q is None else draft.q[kept],
        confidence=draft.confidence[kept],
    )
