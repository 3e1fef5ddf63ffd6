"""Cutting by confidence: only by what was known before the cut token was drawn."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.core.types import BatchState, Draft
from cospec.policies.confidence import Confidence, ConfidenceOptions, cut
from cospec.policies.policy_build_context import PolicyContext
from harness.execution import CPU, World, sequences, steady


def draft(confidence: list[float], parents: tuple[int, ...] | None = None) -> Draft:
    n = len(confidence)
    above = parents if parents is not None else tuple(range(-1, n - 1))
    return Draft("s0", 200, tuple(range(n)), above, ("d",) * n, np.eye(n), np.array(confidence))


def test_a_chain_ends_where_the_product_falls_below_the_bar() -> None:
    found = cut(draft([0.9, 0.8, 0.5, 0.99]), 0.4)
    assert found.tokens == (0, 1)
    assert found.q is not None and found.q.shape == (2, 4)
    assert found.confidence is not None and list(found.confidence) == [0.9, 0.8]
    whole = draft([0.9, 0.8])
    assert cut(whole, 0.1) is whole
    assert len(cut(whole, 0.95)) == 0


def test_nodes_after_a_node_do_not_decide_about_it() -> None:
    chance = np.random.default_rng(0)
    for _ in range(200):
        head, bar = list(chance.random(3)), chance.random()
        kept = {min(3, len(cut(draft([*head, *chance.random(4)]), bar))) for _ in range(5)}
        assert len(kept) == 1


def test_a_tree_loses_branches_and_keeps_its_order() -> None:
    found = cut(draft([0.9, 0.1, 0.9, 0.9, 0.2], (-1, -1, 0, 1, 0)), 0.5)
    assert found.tokens == (0, 2)
    assert found.parents == (-1, 0)


def test_drafts_without_confidence_stay() -> None:
    plain = Draft("s0", 200, (1, 2), (-1, 0), ("d", "d"))
    assert cut(plain, 0.99) is plain


def made() -> Confidence:
    return Confidence.build(ConfidenceOptions(threshold=0.25), PolicyContext(costs=CPU))


def test_drafts_are_asked_for_to_a_threshold() -> None:
    policy = made()
    World(CPU, steady(0.8, 0.8), 2).play(policy, 50)
    for budget in policy.plan(BatchState(sequences(2))):
        assert (budget.depth, budget.threshold) == (8, 0.25)
    assert sum(budget.max_nodes for budget in policy.plan(BatchState(sequences(8), token_budget=14))) <= 6


def test_the_load_decides_how_much_is_verified() -> None:
    kept = {}
    for count in (1, 32):
        policy = made()
        World(CPU, steady(*[0.9] * count), count).play(policy, 100)
        policy.plan(BatchState(sequences(count)))
        kept[count] = sum(len(one) for one in policy.trim([draft([0.7] * 8)]))
    assert kept[1] > kept[32]


def test_nothing_planned_nothing_cut() -> None:
    one = draft([0.01])
    assert made().trim([one]) == [one]
    assert made().gauges()["speculation_length"] == pytest.approx(0.0)
