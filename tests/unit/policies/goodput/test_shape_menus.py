"""Trees for model drafters: taken where passes of the drafter are dear and second choices are often right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.types import BatchState, Commit, DraftBudget, RequestState
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels
from cospec.policies.policy_build_context import PolicyContext
from harness.execution import World, sequences, steady

DEAR = LatencyModels(
    ForwardLatency(2e-8, (4e-4,), (), 0, 2e-2), ForwardLatency(2e-9, (1e-4,), (), 0, 5e-3)
)  # a pass of the drafter takes a quarter of the target's
STEPS = 1200


@dataclass
class Siblings(World):
    """A second choice is right with ``further`` where the first was wrong."""

    further: float = 0.0

    def _judge(self, one: RequestState, budget: DraftBudget, rate: float, chance: np.random.Generator) -> Commit:
        ranks: list[int] = []
        for width in budget.widths or (1,) * budget.depth:
            right = [chance.random() < (rate if place == 0 else self.further) for place in range(width)]
            if not any(right):
                break
            ranks.append(right.index(True))
        n, rejected = len(one.tokens), len(ranks) < budget.depth
        tokens, path = (1,) * (len(ranks) + 1), tuple(range(len(ranks)))
        own = tuple(ranks) if budget.widths else ()
        return Commit(one.id, n, tokens, path, n, budget.max_nodes, rejected=rejected, ranks=own)


def policy(capabilities: DrafterCapabilities = DrafterCapabilities(), **options: object) -> Goodput:
    given = GoodputOptions.model_validate(options)
    return Goodput.build(given, PolicyContext(costs=DEAR, capabilities=capabilities))


def widest(made: Goodput) -> int:
    """Siblings of the widest level, in the majority of the latest plans."""
    found = [max(max(budget.widths, default=1) for budget in made.plan(BatchState(sequences(2)))) for _ in range(9)]
    return int(np.median(found))


@pytest.mark.parametrize(("further", "branches"), [(0.5, True), (0.0, False)])
def test_trees_where_second_choices_are_right(further: float, branches: bool) -> None:
    """Independence makes trees look good at first; what is observed decides."""
    made = policy(trees=True, probe_share=0.0)
    world = Siblings(DEAR, steady(0.5, 0.5), 2, further=further)
    first = widest(made)
    world.play(made, STEPS)
    assert first > 1
    assert (widest(made) > 1) == branches
    assert made.acceptance.overall == pytest.approx(0.5, abs=0.1), "the rate is that of first choices"


@pytest.mark.parametrize("capabilities", [DrafterCapabilities(), DrafterCapabilities(chains=True)])
def test_chains_unless_asked_and_able(capabilities: DrafterCapabilities) -> None:
    made = policy(capabilities, trees=capabilities.chains)
    Siblings(DEAR, steady(0.5, 0.5), 2, further=0.5).play(made, 300)
    assert widest(made) == 1


def test_no_more_than_the_room_for_drafts() -> None:
    load = BatchState(sequences(2))
    whole = sum(budget.max_nodes for budget in policy(trees=True).plan(load))
    for most in (2, 5):
        bounded = policy(trees=True, max_verified_tokens=most).plan(load)
        assert 0 < sum(budget.max_nodes for budget in bounded) <= most < whole


class Falling(Siblings):
    """Positions are ever harder, as for heads."""

    def _judge(self, one: RequestState, budget: DraftBudget, rate: float, chance: np.random.Generator) -> Commit:
        levels = 0.8 * 0.6 ** np.arange(budget.depth)
        kept, n = int(np.cumprod(chance.random(budget.depth) < levels).sum()), len(one.tokens)
        return Commit(one.id, n, (1,) * (kept + 1), tuple(range(kept)), n, budget.depth, rejected=kept < budget.depth)


def test_lengths_end_where_positions_fail() -> None:
    """One rate for all positions is higher than that of the last, and drafts too long."""
    found = []
    for by_position in (False, True):
        made, world = policy(per_position=by_position), Falling(DEAR, steady(0.5, 0.5), 2)
        world.play(made, STEPS)
        found.append(float(np.mean(world.lengths[STEPS // 2 :])))
    assert found[1] < found[0]
