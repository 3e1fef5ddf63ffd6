"""Drafters on nodes score known tokens for the weights of a pool; lost scores cost nothing else."""

from __future__ import annotations

import pytest

from cospec.core.types import DraftBudget, DraftContext
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.models.toy import ToyModel
from harness.node_network import Network, away, context
from harness.pools import pool_of

V = 6
TOKENS = [0, 1]
while len(TOKENS) < 40:
    TOKENS.append(int(ToyModel(V, order=2, seed=1, sharpness=2.0).logits(TOKENS).argmax()))


def right() -> ModelDrafter:
    return ModelDrafter(ToyModel(V, order=2, seed=1, sharpness=2.0))


def wrong() -> ModelDrafter:
    return ModelDrafter(ToyModel(V, order=1, seed=9))


def test_scores_are_those_of_the_drafter() -> None:
    _, executor = away(wrong(), V)
    asked = [context("a", TOKENS), context("b", TOKENS[:3])]
    assert executor.submit("score_known_tokens", asked).result() == wrong().score_known_tokens(asked)
    assert executor.network.link.counts.scores == 2
    assert executor.submit("propose", asked, [DraftBudget(2, 2)] * 2).result()[0].tokens == tuple(
        wrong().propose(asked, [DraftBudget(2, 2)] * 2)[0].tokens
    )


@pytest.mark.parametrize("lost", [False, True])
def test_hedge_learns_from_the_scores_of_nodes(lost: bool) -> None:
    """The control loses the answers: then both drafters have equal weights, and nothing else happens."""

    def fault(asked: DraftContext, network: Network) -> None:
        while network.to_node:
            network.reach_node()
        if lost and asked is not None and not network.link.counts.drafts:
            network.to_verifier.clear()
        network.settle()

    pool = pool_of({"wrong": away(wrong(), V, fault)[0], "right": away(right(), V, fault)[0]}, "union", "hedge", V)
    for _ in range(2):  # scores of the first step count in the second step
        drafts = pool.propose([context("a", TOKENS)], [DraftBudget(2, 2)])
    weights = pool.weights()
    if lost:
        assert weights["right"] == pytest.approx(weights["wrong"])
    else:
        assert weights["right"] > 0.9 and {*drafts[0].drafters} == {"right"}
    assert not pool.left_out()["right"]


def test_a_drafter_that_cannot_score_is_tried_instead() -> None:
    scoring, other = away(right(), V)[0], away(NgramDrafter(1, 3), V)[0]
    pool = pool_of({"scoring": scoring, "other": other}, "union", "hedge", V)
    pool.propose([context("a", TOKENS)], [DraftBudget(2, 2)])
    assert pool.coordinator.pool_config.unscored == frozenset({1})
