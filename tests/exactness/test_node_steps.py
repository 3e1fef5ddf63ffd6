"""Drafters on nodes that draft token by token: outputs follow the target's distribution, whatever the network does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cospec.core.plugin_base import Drafter
from cospec.core.types import Draft, DraftBudget, DraftContext, Request, SpeculationParams
from cospec.drafters.pool.pool import PoolDrafter
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import BranchingRandom, BranchTrace, OutputDistribution, enumerate_runs, total_variation
from harness.node_network import Fault, away, every_fault, settle
from harness.pools import pool_engine, pool_of, toy_drafters
from harness.reference import joint_distribution_of
from harness.toys import drawing, make_request, run_all, tokens_of, toy_engine

EXACT, SEEN = 1e-12, 1e-3
PROMPT, PLAIN = (0, 1, 0), SamplingParams(max_tokens=8, temperature=0.9)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, seed=5)
V = 2


def stepping(fault: Fault, combiner: str = "mix", vocab_size: int = V) -> PoolDrafter:
    """A pool of two drafters on nodes and one here; messages of the first node meet the fault."""
    here = toy_drafters(vocab_size, ("first", "second", "copy"))
    drafters: dict[str, Drafter] = {
        "first": away(here["first"], vocab_size, fault)[0],
        "second": away(here["second"], vocab_size)[0],
        "copy": here["copy"],
    }
    return pool_of(drafters, combiner, "hedge", vocab_size, token_steps=True)


def error(pool: Callable[[], Drafter], acceptance_method: str, length: int = 3, k: int = 2) -> float:
    """Total variation between the enumerated distribution of a request's first tokens and the target's."""
    target = ToyModel(V, order=2, seed=1)
    watched = Request(
        "r", PROMPT, PLAIN, 5, parent="r", speculation=SpeculationParams(acceptance_method=acceptance_method)
    )

    def run(trace: BranchTrace) -> tuple[int, ...]:
        def draws(seed: int, base: int) -> RandomStreams | BranchingRandom:
            return BranchingRandom(trace, base) if seed == watched.seed else RandomStreams(seed, base)

        engine, output = pool_engine(target, pool(), "auto", k, 2 * k), tuple[int, ...]()
        with drawing(draws):
            engine.add(watched)
            while len(output) < length:
                output += tuple(token for event in engine.step() for token in event.tokens)
        return output[:length]

    found: OutputDistribution = enumerate_runs(run)
    return total_variation(found, joint_distribution_of(target, PLAIN, PROMPT, length))


@pytest.mark.parametrize("fault", [settle, every_fault])
@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_mixtures_of_distributions_from_nodes(acceptance_method: str, fault: Fault) -> None:
    """The verifier draws after the deadline: lateness selects nothing, and no node needs trust."""
    assert error(lambda: stepping(fault), acceptance_method) < EXACT


class Selecting(PoolDrafter):
    """Wrong on purpose: a draft whose first token is 0 is late."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        return [draft for draft in super().propose(contexts, budgets) if draft.tokens[0] != 0]


def test_lateness_after_the_draw_is_seen() -> None:
    """The control."""

    def pool() -> PoolDrafter:
        made = stepping(settle)
        return Selecting(made.members, made.combiner, made.routing, made.setting)

    assert error(pool, "rejection", 2) > SEEN


@pytest.mark.parametrize("fault", [settle, every_fault])
@pytest.mark.parametrize("combiner", ["fuse", "mix"])
def test_match_writes_the_same(combiner: str, fault: Fault) -> None:
    target = ToyModel(3, order=2, seed=1)
    requests = [make_request(f"{n}", PROMPT, replace(SEEDED, seed=n) if n % 2 else GREEDY) for n in range(6)]
    wanted = tokens_of(run_all(toy_engine(target, None), requests))
    engine = pool_engine(target, stepping(fault, combiner, 3), "match")
    assert tokens_of(run_all(engine, requests)) == wanted
    assert sum(engine.metrics().accepted_tokens.values()) > 20


@pytest.mark.parametrize("kind", [StreamKind.TARGET, StreamKind.DRAFT])
@pytest.mark.parametrize("combiner", ["fuse", "mix"])
def test_token_steps_draft_as_drafters_here(combiner: str, kind: StreamKind) -> None:
    """Without faults the drafts are those of the same pool in one process."""
    contexts = [DraftContext(f"{n}", [*PROMPT, n % 3], 4, SEEDED if n % 2 else GREEDY, n, kind) for n in range(6)]
    budgets = [DraftBudget(3, 6)] * len(contexts)
    wanted = {each.id: each for each in pool_of(toy_drafters(3), combiner, "all", 3).propose(contexts, budgets)}
    away_too = stepping(settle, combiner, 3)
    found = pool_of({each.name: each.drafter for each in away_too.members}, combiner, "all", 3, token_steps=True)
    drafts = found.propose(contexts, budgets)
    assert {draft.id for draft in drafts} == set(wanted)
    for draft in drafts:
        same = wanted[draft.id]
        assert (draft.tokens, draft.parents) == (same.tokens, same.parents)
        assert (draft.q is None) == (same.q is None)
        if draft.q is not None and same.q is not None:
            assert draft.q == pytest.approx(same.q, abs=1e-12)
