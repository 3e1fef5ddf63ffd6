"""A pool keeps the distribution, with every combiner and every exact acceptance method that may verify its drafts.

Each path through the random choices has an engine of its own, because a pool learns: its weights and confidences depend
on what was committed before. Other requests run in the same batch, so that
weights and confidences differ from those at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast
from unittest.mock import patch

import numpy as np
import pytest

from cospec.core.plugin_base import Drafter
from cospec.core.sampling import History
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.pool import PoolContext, PoolDrafter
from cospec.drafters.pool.routing.all import AllDrafters
from cospec.drafters.pool.routing.drafter_weights import DrafterWeights
from cospec.drafters.pool.routing.explore import Explore
from cospec.drafters.pool.routing.routing import Feedback, Routing, RoutingInput
from cospec.errors import InvalidInput
from cospec.models.toy import ToyModel
from cospec.registry import ACCEPTANCE_METHODS, COMBINERS, ROUTINGS
from cospec.rng.random_streams import RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from cospec.verify.enumerated_draws import SharedRandom
from harness.enumerated_draws import (
    BranchingRandom,
    BranchTrace,
    OutputDistribution,
    Unsound,
    enumerate_runs,
    total_variation,
)
from harness.pools import pool_engine, pool_of, toy_drafters
from harness.reference import joint_distribution_of
from harness.target_probs import target_probs_of
from harness.toys import drawing, enumerated_distribution, make_request, toy_engine

EXACT, SEEN = 1e-12, 1e-3
PROMPT = (0, 1, 0)
PLAIN = SamplingParams(max_tokens=8, temperature=0.9)
FEW_PATHS = SamplingParams(max_tokens=10, temperature=0.9, min_p=0.5)
PARAMS = {
    "plain": PLAIN,
    "greedy": SamplingParams(max_tokens=8, temperature=0.0),
    "edited": SamplingParams(max_tokens=8, temperature=0.8, min_p=0.3, repetition_penalty=1.4, logit_bias={1: 0.4}),
}
JUDGED = [
    (combiner, acceptance_method)
    for combiner in COMBINERS
    for acceptance_method in ACCEPTANCE_METHODS
    if ACCEPTANCE_METHODS.load(acceptance_method).exact
    and ACCEPTANCE_METHODS.load(acceptance_method).stream_kind in COMBINERS.load(combiner).stream_kinds
]


def target(vocab_size: int = 2) -> ToyModel:
    return ToyModel(vocab_size, order=2, seed=1)


def pool_with(combiner: str, routing: str | Routing, names: Sequence[str], **context: Any) -> PoolDrafter:
    """A pool of toy drafters; ``context`` are fields of ``PoolContext``."""
    plain = pool_of(toy_drafters(2, names), combiner, routing, 2)
    return PoolDrafter(plain.members, plain.combiner, plain.routing, PoolContext(2, plain.setting.clock, **context))


@dataclass(frozen=True)
class OwnNoise(BranchingRandom):
    """Draws of a drafter with the target's noise are branches too: the distribution holds for every draw."""

    def token(self, weights: np.ndarray, position: int, kind: StreamKind, branch: int = 0) -> int:
        if kind is StreamKind.TARGET:
            return self.trace.choose(list(weights / weights.sum()))
        return super().token(weights, position, kind, branch)


Parts = tuple[str, str | Routing, Sequence[str]]  # combiner, routing, drafters


def error(
    pool: Parts | Callable[[], PoolDrafter],
    acceptance_method: str,
    params: SamplingParams,
    length: int,
    k: int = 2,
    branching: type[BranchingRandom] = BranchingRandom,
) -> float:
    """Total variation between a request's distribution and the target's; a seeded request runs at the same time."""
    build = partial(pool_with, *pool) if isinstance(pool, tuple) else pool
    other = make_request("other", (1, 0, 1, 0), SamplingParams(max_tokens=8, seed=77))
    watched = Request(
        "watched",
        PROMPT,
        params,
        5,
        parent="watched",
        speculation=SpeculationParams(acceptance_method=acceptance_method),
    )

    def run(trace: BranchTrace) -> tuple[int, ...]:
        def real(seed: int, base: int) -> RandomStreams | BranchingRandom:
            return branching(trace, base) if seed == watched.seed else RandomStreams(seed, base)

        def own(seed: int, base: int) -> RandomStreams | BranchingRandom:
            return OwnNoise(trace, base) if seed == watched.seed else RandomStreams(seed, base)

        engine = pool_engine(target(), build(), "auto", k, 2 * k)
        output: tuple[int, ...] = ()
        with drawing(real), ExitStack() as stack:
            for module in ("model", "dynamic_tree", "pool.candidates"):
                stack.enter_context(patch(f"cospec.drafters.{module}.RandomStreams", own))
            for each in (other, watched):
                engine.add(each)
            while len(output) < length:
                output += tuple(t for event in engine.step() if event.id == watched.id for t in event.tokens)
                engine.check_integrity()
        return output[:length]

    target_probs_of: OutputDistribution = enumerate_runs(run)
    return total_variation(target_probs_of, joint_distribution_of(target(), params, PROMPT, length))


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(("combiner", "acceptance_method"), JUDGED)
def test_every_combiner_under_every_rule(combiner: str, acceptance_method: str, params: str) -> None:
    length = 2 if (combiner, acceptance_method) == ("mix", "match") else 3  # these draws have the most branches
    assert error((combiner, "all", ("first", "copy")), acceptance_method, PARAMS[params], length) < EXACT


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("combiner", "acceptance_method"), [("mix", "block"), ("mix", "rejection"), ("fuse", "match")])
def test_every_routing_over_several_rounds(combiner: str, acceptance_method: str, routing: str) -> None:
    """Weights and confidences move between the steps. Random routing branches like every draw."""
    assert error((combiner, routing, ("first", "second")), acceptance_method, PLAIN, 3, k=1) < EXACT


@pytest.mark.parametrize("routing", ["explore", "hedge"])
@pytest.mark.parametrize(("combiner", "acceptance_method"), [("mix", "block"), ("fuse", "match")])
def test_a_busy_drafter_is_chosen_less_and_the_distribution_stays(
    combiner: str, acceptance_method: str, routing: str
) -> None:
    asked, chosen = list[str](), list[Sequence[int]]()

    def load(member: Member) -> float:
        asked.append(member.name)
        return 3.0 if member.name == "first" else 0.0

    real = ROUTINGS.load(routing).route

    def route(self: Routing, weights: DrafterWeights, choice: RoutingInput) -> list[int]:
        found: list[int] = real(self, weights, choice)
        chosen.append(found)
        return found

    with patch.object(Member, "load", property(load)), patch.object(ROUTINGS.load(routing), "route", route):
        assert error((combiner, routing, ("first", "second")), acceptance_method, PLAIN, 3, k=1) < EXACT
    alone = [members for members in chosen if len(members) == 1]
    assert asked and sum(members == [1] for members in alone) > len(alone) / 2


class NotedSimilarities(Explore):
    """``explore`` that notes how similar the tokens were that it learned from."""

    noted: ClassVar[set[float]] = set()

    def learn(self, weights: DrafterWeights, parts: Mapping[int, Feedback]) -> None:
        self.noted.update(value for part in parts.values() for value in part.similarities)
        super().learn(weights, parts)


@pytest.mark.parametrize(("combiner", "acceptance_method"), [("mix", "block"), ("mix", "match"), ("fuse", "match")])
def test_a_routing_that_compares_tokens(combiner: str, acceptance_method: str) -> None:
    """Under ``block`` the candidates are distributions, so there the similarity decides nothing."""
    NotedSimilarities.noted.clear()

    def build() -> PoolDrafter:
        return pool_with(
            combiner,
            NotedSimilarities(),
            ("first", "second"),
            similarity=lambda one, other: 1.0 if one == other else 0.3,
        )

    assert error(build, acceptance_method, PLAIN, 3, k=1) < EXACT
    assert (0.3 in NotedSimilarities.noted) is (acceptance_method == "match")


@pytest.mark.parametrize("combiner", ["vote", "union"])
def test_catch_ups_after_missed_steps(combiner: str) -> None:
    """One drafter takes part in a step, so another counts hits on the tokens of steps that it missed."""
    counted = 0

    def propose(self: ModelDrafter, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        nonlocal counted
        drafts = real(self, contexts, budgets)
        counted += sum(draft.hits[1] for draft in drafts if draft.id == "watched")
        return drafts

    real = ModelDrafter.propose
    with patch.object(ModelDrafter, "propose", propose):
        build = partial(pool_with, combiner, "hedge", ("first", "second"), at_most=1)
        assert error(build, "match", FEW_PATHS, 8, k=1) < EXACT
    assert counted > 0


class ByChance(AllDrafters):
    """Chooses one of two drafters by a random number of some stream."""

    def __init__(self, kind: StreamKind) -> None:
        self._kind = kind

    def route(self, weights: DrafterWeights, choice: RoutingInput) -> list[int]:
        (number,) = choice.draws.uniforms(choice.base, 1, self._kind)
        return [0 if number < 0.5 else 1]


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_a_routing_by_the_numbers_of_the_acceptance_is_caught(acceptance_method: str) -> None:
    """Numbers of its own leave the distribution; those that accept drafts too do not."""
    own, shared = (
        error(("mix", ByChance(kind), ("first", "second")), acceptance_method, PLAIN, 3, 1, SharedRandom)
        for kind in (StreamKind.ROUTE, StreamKind.ACCEPT)
    )
    assert own < EXACT
    assert shared > SEEN
    with pytest.raises(Unsound, match="was used twice"):
        error(("mix", ByChance(StreamKind.ACCEPT), ("first", "second")), acceptance_method, PLAIN, 3, 1)


@pytest.mark.parametrize("combiner", ["union", "vote", "fuse"])
def test_another_vocabulary_and_suffixes_in_a_pool(combiner: str) -> None:
    assert error((combiner, "hedge", ("foreign", "suffix", "first")), "match", PLAIN, 2) < EXACT


def test_a_pool_of_three() -> None:
    assert error(("mix", "hedge", ("first", "second", "copy")), "block", PLAIN, 3) < EXACT


@pytest.mark.parametrize("combiner", ["union", "vote", "fuse"])
@pytest.mark.parametrize(
    "acceptance_method",
    [
        acceptance_method
        for acceptance_method in ACCEPTANCE_METHODS
        if ACCEPTANCE_METHODS.load(acceptance_method).stream_kind is StreamKind.DRAFT
    ],
)
def test_a_comparison_of_drawn_tokens_is_not_judged_by_its_q(combiner: str, acceptance_method: str) -> None:
    """Refused where it was asked for, and never drafted where it comes about in another way."""
    pool = pool_of(toy_drafters(), combiner)
    with pytest.raises(
        InvalidInput, match=f"speculation.acceptance_method is '{acceptance_method}', which needs the distribution"
    ):
        pool_engine(target(3), pool).add(
            make_request("r", PROMPT, PLAIN, speculation=SpeculationParams(acceptance_method=acceptance_method))
        )
    with pytest.raises(InvalidInput, match=r"speculative_config\.acceptance_method"):
        pool_engine(target(3), pool, acceptance_method)
    assert pool.propose([DraftContext("s", [0, 1, 0, 1], 2, PLAIN, 0, StreamKind.DRAFT)], [DraftBudget(2, 2)]) == []


@pytest.mark.parametrize("combiner", ["union", "vote", "fuse"])
def test_auto_keeps_to_rules_that_may_judge(combiner: str) -> None:
    engine = pool_engine(target(3), pool_of(toy_drafters(), combiner))
    assert (
        engine.parts.input_processor.resolve(make_request("r", PROMPT, PLAIN)).speculation.acceptance_method == "match"
    )
    mixing = pool_engine(target(3), pool_of(toy_drafters(), "mix"))
    assert (
        mixing.parts.input_processor.resolve(make_request("r", PROMPT, PLAIN)).speculation.acceptance_method != "match"
    )


Rule = Callable[[np.ndarray, int, int], float]
"""What a drafter's distribution, its drawn token and the token before are worth."""


def surer(row: np.ndarray, token: int, before: int) -> float:
    return float(row[token])


def more_similar(row: np.ndarray, token: int, before: int) -> float:
    """As ``explore`` compares tokens, but of the draft itself."""
    return 1.0 if token == before else 0.3


class BetterSample(Drafter):
    """The biased shortcut: of two drafters that draw a token each, the better token is taken, with its drafter's q."""

    name, samples, reads_hidden_states, drafts_ahead, learns = "shortcut", True, False, True, False

    def __init__(self, rule: Rule | None) -> None:
        self._models = (ToyModel(3, order=1, seed=5, sharpness=1.5), ToyModel(3, order=2, seed=7, sharpness=1.0))
        self._rule = rule

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        from cospec.drafters import model  # the draws that the enumeration stands in for

        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            base, tokens, q = len(context.tokens), list[int](), list[np.ndarray]()
            for place in range(min(budget.depth, budget.max_nodes)):
                history = History(context.tokens, context.prompt_len, [tokens])
                rows = [
                    target_probs_of(m.logits([*context.tokens, *tokens])[None], context.sampling, history)[0]
                    for m in self._models
                ]
                draws = cast(Any, model).RandomStreams(context.seed, base)  # as ``drawing`` replaces them
                drawn = [draws.token(row, base + place, StreamKind.DRAFT, branch) for branch, row in enumerate(rows)]
                before, rule = [*context.tokens, *tokens][-1], self._rule
                worth = [0.0 if rule is None else rule(*each, before) for each in zip(rows, drawn, strict=True)]
                winner = place % 2 if rule is None else int(worth[1] > worth[0])
                tokens.append(drawn[winner])
                q.append(rows[winner])
            n = len(tokens)
            if n:
                names = (self.name,) * n
                drafts.append(Draft(context.id, base, tuple(tokens), tuple(range(-1, n - 1)), names, np.stack(q)))
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None: ...

    def free(self, ids: Sequence[str]) -> None: ...


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_the_better_of_two_samples_against_its_own_q_is_seen(acceptance_method: str) -> None:
    """Also where better is more similar: no routing may compare tokens that are not committed."""
    wanted = joint_distribution_of(target(3), PLAIN, PROMPT, 3)
    for rule in (surer, more_similar, None):
        found = enumerated_distribution(
            toy_engine(target(3), BetterSample(rule), acceptance_method, 1), PROMPT, PLAIN, 3
        )
        apart = total_variation(found, wanted)
        assert apart < EXACT if rule is None else apart > SEEN
