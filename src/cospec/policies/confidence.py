"""Stop drafting where the drafter is uncertain, and cut tokens not worth verifying (SmartSpec, algorithm 3).

A draft ends where the running product of its confidences falls below a threshold. The product estimates the
probability that the whole prefix is accepted. Each draft is then cut to the part that pays at the planned goodput.
Algorithm 3 compares the confidence of the latest token alone with T. A token only counts if all tokens before it are
accepted, so its own confidence overestimates its value after doubtful tokens.

Both cuts depend only on confidences of a node and its ancestors, which are known before the node's token is drawn. A
cut that used later values would select tokens by their own values, and would bias the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.plugin_options import Options
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.policy_build_context import PolicyContext


class ConfidenceOptions(Options):
    """Options of ``confidence``.

    Attributes:
        goodput: options of the policy ``goodput``, which decides who gets a draft.
        threshold: drafting stops where the product of the confidences falls below this number.
    """

    goodput: GoodputOptions = GoodputOptions()
    threshold: float = Field(default=0.3, ge=0, lt=1)


class Confidence(Policy):
    """``confidence``: goodput decides which requests get drafts, confidence decides their length."""

    Options: ClassVar[type[ConfidenceOptions]] = ConfidenceOptions
    needs_latency: ClassVar[bool] = True
    learns: ClassVar[bool] = True

    def __init__(self, goodput: Goodput, threshold: float, longest: int) -> None:
        self._goodput = goodput
        self._budget = DraftBudget(depth=longest, max_nodes=longest, threshold=threshold)
        self._load: BatchState | None = None

    @classmethod
    def build(cls, options: ConfidenceOptions, context: PolicyContext) -> Confidence:
        """Build the policy around its own goodput policy."""
        return cls(Goodput.build(options.goodput, context), options.threshold, context.longest)

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Return the full depth with a threshold for each request whose draft is expected to pay."""
        self._load = load
        planned, found = self._goodput.plan(load), []
        taken = load.other_prefill_tokens + len(load.ready) + sum(budget.max_nodes for budget in planned)
        room = load.token_budget - taken
        for budget in planned:
            more = min(self._budget.depth - budget.depth, room)
            if budget.depth > 0 and not budget.widths and more >= 0:
                room -= more
                nodes = budget.depth + more
                budget = replace(self._budget, depth=nodes, max_nodes=nodes)
            found.append(budget)
        return found

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Return the part of each draft that pays for its verification at the planned goodput."""
        if not drafts or self._load is None:
            return drafts
        bar = self._goodput.price(self._load)
        kept = (cut(draft, bar) for draft in drafts)
        return [draft for draft in kept if len(draft)]

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Pass the step to the goodput policy."""
        self._goodput.observe(stats, commits)

    def learn(self) -> None:
        """Let the goodput policy learn."""
        self._goodput.learn()

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of the goodput policy."""
        return self._goodput.gauges()


def cut(draft: Draft, bar: float) -> Draft:
    """Keep the nodes whose product of confidences from the root is at least ``bar``; all nodes without confidences."""
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
