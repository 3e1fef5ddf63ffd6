"""No policy changes what is written: it decides how far to draft by what is past, and cuts by what was known before.

Token for token under ``match``, and by enumeration under the other rules. Clocks tick by the call, so that every path
of an enumeration sees the same decisions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget, Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.models.toy import ToyModel
from cospec.policies.fixed import Off
from cospec.registry import POLICIES
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import Unsound, total_variation
from harness.overlap import Peeking, Picky, under
from harness.policies import ByItsOwnPast, cut_by_the_cut_token, head, with_policy
from harness.reference import joint_distribution_of
from harness.toys import enumerated_distribution_among, make_request, run_all, tokens_of, toy_engine, with_pool

EXACT, SEEN = 1e-12, 1e-3
LENGTH = 4
PROMPT = (0, 1, 0)
PARAMS = SamplingParams(max_tokens=8, temperature=0.9)
OPTIONS = {"slope": {"decision_threshold": 4, "significance": 0.0}}
PLAYERS = 16


def target(size: int = 2) -> ToyModel:
    return with_pool(ToyModel(size, order=2, seed=1), 200, 4)


def drafter(size: int = 2) -> ModelDrafter:
    return ModelDrafter(with_pool(ToyModel(size, order=1, seed=5, sharpness=1.5), 200, 4))


def engine(name: str, acceptance_method: str = "auto", size: int = 2, k: int = 2, **options: object) -> Engine:
    ticks = itertools.count()
    speculative = SpeculativeConfig(
        num_speculative_tokens=k,
        acceptance_method=acceptance_method,
        policy=name,
        policy_options={**OPTIONS.get(name, {}), **options},
        execution_mode="sequential",
    )
    clock = SimpleNamespace(monotonic=lambda: next(ticks) * 1e-3)  # servers of this process keep the module's clock
    with patch("cospec.assembly.build.time", clock):
        parts = assemble(target(size), drafter(size), speculative, EngineConfig(), TextInfo())
    return Engine(replace(parts, clock=lambda: next(ticks) * 1e-3))


def watched(policy: Policy, acceptance_method: str) -> Engine:
    """An engine with a policy that no configuration names."""
    return with_policy(engine("fixed", acceptance_method), policy)


def distance_under(build: Callable[[], Engine], acceptance_method: str, company_size: int = 2) -> float:
    """Total variation from the target distribution; earlier requests teach the policy."""
    chosen = SpeculationParams(acceptance_method=acceptance_method)
    company = [
        Request(f"a{n}", (n, 1, 0), SamplingParams(max_tokens=6), n, speculation=chosen) for n in range(company_size)
    ]
    request = Request("z", PROMPT, PARAMS, 99, arrival=1.0, speculation=chosen)
    found = enumerated_distribution_among(build, company, request, LENGTH)
    return total_variation(found, joint_distribution_of(target(), PARAMS, PROMPT, LENGTH))


@pytest.mark.parametrize(
    ("acceptance_method", "name"),
    [
        (method, name)
        for method in ("rejection", "block")
        for name in POLICIES
        if (method, name) != ("rejection", "milp")
    ],
)  # ``milp`` solves a program in every step
def test_the_distribution_is_the_targets(acceptance_method: str, name: str) -> None:
    assert distance_under(lambda: engine(name, acceptance_method), acceptance_method) < EXACT


class ByWhatWasKnown(ByItsOwnPast):
    """Cuts a draft where the drafter's distribution was flat, before the draw."""

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        return [self._cut(draft) for draft in drafts]

    def _cut(self, draft: Draft) -> Draft:
        assert draft.q is not None
        keep = 1 if len(draft) > 1 and draft.q[1].max() < 0.75 else len(draft)
        return head(draft, keep)


class ByTheTokenItself(ByItsOwnPast):
    """Keeps a last token only if it is word 0: what no policy may do."""

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        return cut_by_the_cut_token(drafts)


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
@pytest.mark.parametrize("policy", [ByItsOwnPast, ByWhatWasKnown])
def test_what_is_past_and_what_was_known_may_decide(policy: type[Off], acceptance_method: str) -> None:
    assert distance_under(lambda: watched(policy(), acceptance_method), acceptance_method) < EXACT


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_a_cut_by_the_cut_token_is_caught(acceptance_method: str) -> None:
    assert distance_under(lambda: watched(ByTheTokenItself(), acceptance_method), acceptance_method) > SEEN


class ByShape(ByItsOwnPast):
    """Turns between a chain and trees of two shapes, by what was accepted before."""

    SHAPES = DraftBudget(2, 2), DraftBudget(1, 2, (2,)), DraftBudget(2, 4, (2, 1))

    def plan(self, load: BatchState) -> list[DraftBudget]:
        return [self.SHAPES[self.lengths.get(one.id, 1)] for one in load.ready]

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self.lengths[commit.id] = (self.lengths.get(commit.id, 1) + 1 + len(commit.path)) % 3


class ByTheLastOfAShape(ByShape, ByTheTokenItself):
    """Keeps the last token of a shape only if it is word 0: what no policy may do."""


def test_shapes_may_change_from_step_to_step() -> None:
    assert distance_under(lambda: watched(ByShape(), "recursive"), "recursive") < EXACT


def test_the_distribution_where_goodput_chooses_trees() -> None:
    assert distance_under(lambda: engine("goodput", "recursive", trees=True, per_position=True), "recursive") < EXACT


def test_a_shape_by_the_tokens_drawn_is_caught() -> None:
    assert distance_under(lambda: watched(ByTheLastOfAShape(), "recursive"), "recursive") > SEEN


KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "seeded": SamplingParams(temperature=0.9, max_tokens=24, seed=11, top_p=0.95, repetition_penalty=1.1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POLICIES)
def test_token_for_token(name: str, kind: str) -> None:
    requests = [make_request(f"r{n}", (n % 5, 1, 2, n % 3), KINDS[kind]) for n in range(PLAYERS)]
    plain = tokens_of(run_all(toy_engine(target(6), None), requests))
    made = engine(name, size=6)
    assert tokens_of(run_all(made, requests)) == plain
    drafted = sum(made.metrics().draft_tokens.values())
    assert (drafted > 0) == (name != "off")


@pytest.mark.parametrize("kind", KINDS)
def test_token_for_token_where_goodput_chooses_trees(kind: str) -> None:
    requests = [make_request(f"r{n}", (n % 5, 1, 2, n % 3), KINDS[kind]) for n in range(3)]
    plain = tokens_of(run_all(toy_engine(target(6), None), requests))
    made, shapes, ranks = engine("goodput", size=6, k=4, trees=True), set[tuple[int, ...]](), set[int]()
    plan, observe = made.scheduler.policy.plan, made.scheduler.policy.observe

    def noted(load: BatchState) -> list[DraftBudget]:
        found = plan(load)
        shapes.update(budget.widths for budget in found)
        return found

    def seen(stats: StepStats, commits: Sequence[Commit]) -> None:
        ranks.update(rank for commit in commits for rank in commit.ranks)
        observe(stats, commits)

    policy = made.scheduler.policy
    with patch.object(policy, "plan", noted), patch.object(policy, "observe", seen):
        assert tokens_of(run_all(made, requests)) == plain
    assert any(max(widths, default=1) > 1 for widths in shapes)
    assert {0, 1} <= ranks, "second choices are accepted too"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("execution_mode", ["pipelined", "draft-ahead", "draft-for-outcomes"])
@pytest.mark.parametrize("name", POLICIES)
def test_outputs_are_equal_when_drafting_overlaps(name: str, execution_mode: str, kind: str) -> None:
    requests = [make_request(f"r{n}", (n % 5, 1, 2, n % 3), KINDS[kind]) for n in range(PLAYERS)]
    plain = tokens_of(run_all(toy_engine(target(6), None), requests))
    assert tokens_of(run_all(under(engine(name, size=6), execution_mode), requests)) == plain


@pytest.mark.parametrize("execution_mode", ["pipelined", "draft-ahead", "draft-for-outcomes"])
@pytest.mark.parametrize("name", ["goodput", "slope", "confidence"])
@pytest.mark.parametrize(("k", "acceptance_method"), [(1, "block"), (2, "rejection")])
def test_distributions_are_equal_when_drafting_overlaps(
    k: int, name: str, execution_mode: str, acceptance_method: str
) -> None:
    """With drafts of one token, what was drafted ahead is judged within the length; with two, lengths change."""
    assert (
        distance_under(lambda: under(engine(name, acceptance_method, k=k), execution_mode), acceptance_method) < EXACT
    )


@pytest.mark.parametrize(("name", "acceptance_method"), [("goodput", "rejection"), ("fixed", "block")])
def test_choosing_drafts_made_ahead_by_their_tokens_is_caught(name: str, acceptance_method: str) -> None:
    assert (
        distance_under(lambda: under(engine(name, acceptance_method, k=1), "draft-ahead", cls=Picky), acceptance_method)
        > SEEN
    )


@pytest.mark.parametrize("name", ["goodput", "fixed"])
def test_a_choice_that_depends_on_what_was_drawn_ahead_is_caught(name: str) -> None:
    """The order in which the enumeration branches rests on this."""
    with pytest.raises(Unsound, match="depends on what was drawn ahead"):
        distance_under(lambda: under(engine(name, "block"), "draft-ahead", cls=Peeking), "block")


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_its_own_policy(kind: str) -> None:
    names = [None, *POLICIES]
    requests = [
        make_request(f"r{n}", (n % 5, 1, 2), KINDS[kind], speculation=SpeculationParams(policy=names[n % len(names)]))
        for n in range(PLAYERS)
    ]
    plain = tokens_of(run_all(toy_engine(target(6), None), requests))
    assert tokens_of(run_all(engine("goodput", size=6), requests)) == plain


def test_a_released_cache_is_filled_again() -> None:
    """Prefill disabling in the middle of an output."""

    class OnAndOff(ByItsOwnPast):
        def __init__(self) -> None:
            super().__init__()
            self.rounds = 0

        def plan(self, load: BatchState) -> list[DraftBudget]:
            self.rounds += 1
            if self.rounds % 6 == 3:
                return [DraftBudget(release=True)] * len(load.ready)
            return [DraftBudget(2, 2) if self.rounds % 6 < 3 else DraftBudget()] * len(load.ready)

    made = watched(OnAndOff(), "auto")
    requests = [make_request(f"r{n}", (n % 2, 1, 0), KINDS["greedy"]) for n in range(3)]
    plain = tokens_of(run_all(toy_engine(target(), None), requests))
    held = cast(Any, made.execution_mode.components.drafter).model.pages
    usage = []
    for request in requests:
        made.add(request)
    found: dict[str, tuple[int, ...]] = {request.id: () for request in requests}
    while made.has_work:
        for event in made.step():
            found[event.id] += event.tokens
        usage.append(held.usage)
        held.check_integrity()
    assert found == plain
    assert any(one > 0 and two == 0 and any(usage[n + 2 :]) for n, (one, two) in enumerate(itertools.pairwise(usage)))
