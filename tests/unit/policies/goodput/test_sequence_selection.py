"""Steps that leave out sequences: which size is chosen, whose turn comes, and what the oracle finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import BatchState, Commit, DraftBudget, RequestState
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.goodput.draft_shapes import chains, tree_tokens
from cospec.policies.goodput.length_optimizer import LengthChoice
from cospec.policies.goodput.length_problem import LengthProblem
from cospec.policies.goodput.sequence_selection import GAIN, SequenceSelection, batch_sizes, best_size, in_turns
from cospec.policies.goodput.step_costs import StepCosts
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels, StepLatency
from cospec.policies.milp import Milp, MilpOptions
from cospec.policies.policy_build_context import PolicyContext
from harness.execution import FLAT, sequences

DRAFT = ForwardLatency(slopes=(1e-5,), fixed=1e-4)
CROWDED = LatencyModels(ForwardLatency(slopes=(1e-4, 5e-3), knees=(6.0,), fixed=1e-3), DRAFT)
TARGET = ForwardLatency(slopes=(1e-4, 5e-3), knees=(6.0,), sequence=5e-4, fixed=1e-3)  # a sequence costs, too


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


def taught(policy: Policy, ready: Sequence[RequestState], rates: Sequence[float]) -> None:
    """Show a policy 200 steps with drafts of two tokens, accepted at ``rates``; the steps take the modelled time."""
    chance, count = np.random.default_rng(0), len(ready)
    times = StepTimes(DRAFT.seconds(0, count, count, 2), TARGET.seconds(0, 3 * count, count))
    for step in range(200):
        kept = np.cumprod(chance.random((count, 2)) < np.array(rates)[:, None], axis=1).sum(axis=1).tolist()
        commits = [
            Commit(one.id, 16, (1,) * (own + 1), tuple(range(own)), 16, 2, rejected=own < 2)
            for one, own in zip(ready, kept, strict=True)
        ]
        accepted, total = sum(kept), times.draft + times.target
        stats = StepStats(step, count, 3 * count, 0, 2, 2 * count, accepted, accepted + count, times, total, count)
        policy.observe(stats, commits)
    policy.learn()


def best_goodput(rates: np.ndarray) -> float:
    """The most tokens per second of a step with all of these sequences, over all lengths up to two."""
    count, best = len(rates), 0.0
    for lengths in product(range(3), repeat=count):
        tokens = sum(tree_tokens(rate, (1,) * length) for rate, length in zip(rates, lengths, strict=True))
        drafting = DRAFT.fixed * max(lengths) + DRAFT.slopes[0] * sum(lengths)
        best = max(best, tokens / (drafting + TARGET.seconds(0, count + sum(lengths), count)))
    return best


@pytest.mark.parametrize(
    ("rates", "size"),
    [
        ((0.7,) * 7, 3),
        ((0.95, 0.9, 0.3, 0.2, 0.9, 0.95, 0.1), 2),
        ((0.1, 0.2, 0.95, 0.95, 0.9, 0.3, 0.2), 4),
        ((0.2, 0.1, 0.2, 0.3, 0.1, 0.2, 0.95), 6),
    ],
)
def test_the_oracle_finds_the_best_prefix(rates: tuple[float, ...], size: int) -> None:
    """The program takes the prefix that brute force finds; the policy's is within two percent.

    Sets that are no prefix are outside of the choice, although the best of them may gain: first come, first served.
    """
    ready = sequences(len(rates), length=16)
    context = PolicyContext(costs=LatencyModels(TARGET, DRAFT), num_speculative_tokens=2)
    program = Milp.build(MilpOptions(goodput=GoodputOptions(choose_batch=True)), context)
    quick = Goodput.build(GoodputOptions(choose_batch=True), context)
    for policy in (program, quick):
        taught(policy, ready, rates)
    learned = quick.acceptance.rates([one.id for one in ready])
    values = {count: best_goodput(learned[:count]) for count in range(1, len(rates) + 1)}
    assert max(values, key=values.__getitem__) == size, "the best size depends on the rates"
    assert values[size] > GAIN * values[len(rates)]
    assert best_goodput(np.sort(learned)[-size:]) >= values[size]
    assert taken(program.plan(BatchState(ready))) == list(range(size))
    chosen = taken(quick.plan(BatchState(ready)))
    assert chosen == list(range(len(chosen)))
    assert values[len(chosen)] >= 0.98 * values[size]


def test_the_oracle_examines_every_size() -> None:
    assert batch_sizes(20, every=True) == list(range(20, 0, -1))
