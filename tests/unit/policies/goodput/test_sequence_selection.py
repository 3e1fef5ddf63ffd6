"""Steps that leave out sequences: which size is chosen, whose turn comes, and what the oracle finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from cospec.core.types import BatchState, DraftBudget
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.goodput.draft_shapes import chains
from cospec.policies.goodput.length_optimizer import LengthChoice
from cospec.policies.goodput.length_problem import LengthProblem
from cospec.policies.goodput.sequence_selection import SequenceSelection, batch_sizes, best_size, in_turns
from cospec.policies.goodput.step_costs import StepCosts
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels, StepLatency
from cospec.policies.milp import Milp, MilpOptions
from cospec.policies.policy_build_context import PolicyContext
from harness.execution import FLAT, sequences

DRAFT = ForwardLatency(slopes=(1e-5,), fixed=1e-4)
CROWDED = LatencyModels(ForwardLatency(slopes=(1e-4, 5e-3), knees=(6.0,), fixed=1e-3), DRAFT)


def goodput(costs: LatencyModels, **options: object) -> Goodput:
    given = GoodputOptions.model_validate({"choose_batch": True, **options})
    return Goodput.build(given, PolicyContext(costs=costs))


def of_size(tokens: float, seconds: float) -> LengthChoice:
    return LengthChoice(np.zeros(1, np.int64), tokens, seconds)


def taken(budgets: list[DraftBudget]) -> list[int]:
    return [place for place, budget in enumerate(budgets) if not budget.skip_step]


def test_the_size_with_most_tokens_per_second_within_the_limit() -> None:
    outcomes = {8: of_size(8, 8.0), 4: of_size(4, 2.0), 2: of_size(2, 1.5)}
    assert best_size((8, 4, 2), float("inf"), outcomes.__getitem__) == 4
    assert best_size((8, 4, 2), 1.6, outcomes.__getitem__) == 2
    assert best_size((8, 4, 2), 0.1, outcomes.__getitem__) == 2, "no step is short enough"


def test_a_gain_within_the_error_leaves_out_none() -> None:
    outcomes = {8: of_size(8, 1.0), 4: of_size(4, 0.495)}
    assert best_size((8, 4), float("inf"), outcomes.__getitem__) == 8


@pytest.mark.parametrize("limit", [float("inf"), 2.0])
def test_the_peak_is_found_from_any_size(limit: float) -> None:
    """Tokens beyond 24 are dear; few sizes are examined from the best, or where all fit."""
    sizes = batch_sizes(64)

    def crowded(size: int) -> LengthChoice:
        return of_size(size, 1.0 + 0.05 * size + 0.5 * max(0, size - 24))

    best = best_size(sizes, limit, crowded)
    assert best == (24 if limit > 3 else 16)
    for latest in sizes:
        assert best_size(sizes, limit, crowded, latest) == best
    asked = set[int]()

    def roomy(size: int) -> LengthChoice:
        asked.add(size)
        return of_size(size, 1.0 + 0.01 * size)

    assert best_size(sizes, float("inf"), roomy, 64) == 64
    assert asked == {64, 56}


@pytest.mark.parametrize(("count", "size"), [(7, 3), (5, 1), (9, 8)])
def test_none_starves(count: int, size: int) -> None:
    """Every sequence takes part at least once in n / b steps, rounded up, and equally often."""
    choice, ids = SequenceSelection(), [f"s{n}" for n in range(count)]
    choice.size = size
    seen = [taken(choice.taken(ids, [DraftBudget()] * count)) for _ in range(40 * count)]
    assert all(len(each) == size for each in seen)
    turns = -(-count // size)
    for start in range(len(seen) - turns):
        assert len(set().union(*seen[start : start + turns])) == count
    counts = np.bincount(np.concatenate(seen), minlength=count)
    assert counts.max() - counts.min() <= turns


def test_a_new_sequence_does_not_overtake() -> None:
    choice = SequenceSelection()
    choice.size = 1
    for _ in range(3):
        choice.taken(["a", "b"], [DraftBudget()] * 2)
    assert taken(choice.taken(["new", "a", "b"], [DraftBudget()] * 3)) != [0]


@pytest.mark.parametrize("seed", range(6))
def test_each_group_is_solved_once_and_gets_its_best_lengths(seed: int) -> None:
    """The choice equals the choice after solving every group again."""
    chance = np.random.default_rng(seed)
    count, rates = 21, chance.uniform(0.3, 0.98, 21)
    ids, groups = [f"s{n}" for n in range(count)], list[tuple[int, ...]]()
    problem = LengthProblem([chains(8)], StepCosts(StepLatency(CROWDED)))

    def solved(group: Sequence[int]) -> tuple[LengthChoice, list[DraftBudget]]:
        inputs = problem.costs.inputs(BatchState(sequences(len(group))), [50.0] * len(group), None)
        return problem.per_sequence(rates[list(group)], inputs)

    def noted(group: Sequence[int]) -> tuple[LengthChoice, list[DraftBudget]]:
        groups.append(tuple(group))
        return solved(group)

    choice, whole = SequenceSelection(), solved(range(count))
    for _ in range(3):  # from all sequences, then from the latest size
        groups.clear()
        lengths, budgets = choice.choose(ids, *whole, noted)
        assert choice.size is not None and choice.turns(count) == count / choice.size
        expected, own = in_turns(choice.order(ids), choice.size, solved)
        assert (lengths.counts.tolist(), budgets) == (expected.counts.tolist(), own)
        assert (lengths.tokens, lengths.seconds) == (expected.tokens, expected.seconds)
        assert len(set(groups)) == len(groups)
        choice.taken(ids, budgets)


def test_sequences_wait_only_where_a_smaller_step_gains() -> None:
    ready = BatchState(sequences(12))
    assert len(taken(goodput(CROWDED).plan(ready))) < 12
    assert len(taken(goodput(CROWDED, choose_batch=False).plan(ready))) == 12
    assert len(taken(goodput(FLAT).plan(ready))) == 12


def test_a_time_limit_leaves_out_sequences() -> None:
    costs = LatencyModels(ForwardLatency(slopes=(1e-3,), fixed=1e-3), DRAFT)
    assert len(taken(goodput(costs).plan(BatchState(sequences(8))))) == 8
    assert len(taken(goodput(costs, max_step_seconds=0.0055).plan(BatchState(sequences(8))))) <= 4


def test_the_oracle_examines_every_prefix() -> None:
    """The program's goodput is that of the best set of all sets; the policy's is within two percent."""
    assert batch_sizes(20, every=True) == list(range(20, 0, -1))
    ready = sequences(7)
    program = Milp.build(
        MilpOptions(goodput=GoodputOptions(choose_batch=True)), PolicyContext(costs=CROWDED, num_speculative_tokens=2)
    )
    quick = Goodput.build(GoodputOptions(choose_batch=True), PolicyContext(costs=CROWDED, num_speculative_tokens=2))
    chosen, greedy = len(taken(program.plan(BatchState(ready)))), len(taken(quick.plan(BatchState(ready))))

    def best_of(size: int) -> float:
        found = []
        for some in combinations(ready, size):
            policy = Goodput.build(GoodputOptions(), PolicyContext(costs=CROWDED, num_speculative_tokens=2))
            policy.plan(BatchState(list(some)))
            found.append(policy.gauges()["expected_goodput"])
        return max(found)

    best = max(best_of(size) for size in range(1, 8))
    assert best_of(chosen) >= 0.98 * best
    assert best_of(greedy) >= 0.98 * best
