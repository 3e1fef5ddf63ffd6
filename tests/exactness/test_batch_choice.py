"""Steps that leave out sequences by earlier acceptance leave the distribution unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget, Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.execution.sequential import Sequential
from cospec.models.toy import ToyModel
from cospec.policies.fixed import Off
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels
from cospec.policies.policy_build_context import PolicyContext
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import total_variation
from harness.in_flight import with_steps_in_flight
from harness.overlap import under
from harness.reference import joint_distribution_of
from harness.toys import enumerated_distribution_among, make_request, run_all, tokens_of, toy_engine, with_pool

EXACT, SEEN = 1e-12, 1e-3
LENGTH = 4
PARAMS = SamplingParams(max_tokens=6, temperature=0.9)
METHODS = ("rejection", "block")
# a step of two tokens costs far more than two steps
CROWDED = LatencyModels(ForwardLatency(slopes=(0.1, 9.0), knees=(1.0,), fixed=0.1), ForwardLatency(fixed=1e-3))
TURNS = GoodputOptions(choose_batch=True, probe_share=0.0)


class Turns(Goodput):
    """``goodput`` with turns; counts what the steps leave out."""

    def __init__(self) -> None:
        super().__init__(TURNS, PolicyContext(num_speculative_tokens=2, costs=CROWDED))
        self.waits = 0

    def plan(self, load: BatchState) -> list[DraftBudget]:
        budgets = super().plan(load)
        self.waits += sum(budget.skip_step for budget in budgets)
        return budgets


class ByItsPast(Off):
    """Leaves out a sequence for one step after its draft was accepted; the others have drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: set[str] = set()
        self.waits = 0

    def plan(self, load: BatchState) -> list[DraftBudget]:
        left_out = {one.id for one in load.ready[1:]} & self.accepted
        self.accepted.clear()
        self.waits += len(left_out)
        return [DraftBudget(skip_step=True) if one.id in left_out else DraftBudget(2, 2) for one in load.ready]

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        self.accepted |= {commit.id for commit in commits if commit.path}


class ByTheDraft(ByItsPast):
    """Leaves a draft unverified where its first token is not word 0: what no policy may do."""

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        return [draft for draft in drafts if draft.tokens[0] == 0]


def target(size: int = 2) -> ToyModel:
    return with_pool(ToyModel(size, order=2, seed=1), 200, 4)


def engine(policy: Policy, method: str = "auto", size: int = 2) -> Engine:
    ticks = itertools.count()
    drafter = ModelDrafter(with_pool(ToyModel(size, order=1, seed=5, sharpness=1.5), 200, 4))
    speculative = SpeculativeConfig(acceptance_method=method, policy="fixed", execution_mode="sequential")
    parts = assemble(target(size), drafter, speculative, EngineConfig(), TextInfo())
    made = Engine(replace(parts, clock=lambda: next(ticks) * 1e-3))
    made.scheduler.policy = policy
    made.execution_mode = Sequential(replace(made.execution_mode.components, policy=policy))
    return made


def distance_under(build: Callable[[], Engine], method: str) -> float:
    """Distance from the target's distribution, in a batch with another request."""
    chosen = SpeculationParams(acceptance_method=method)
    company = [Request("a", (1, 1, 0), SamplingParams(max_tokens=24), 1, speculation=chosen)]
    request = Request("z", (0, 1, 0), PARAMS, 99, arrival=1.0, speculation=chosen)
    found = enumerated_distribution_among(build, company, request, LENGTH)
    return total_variation(found, joint_distribution_of(target(), PARAMS, (0, 1, 0), LENGTH))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [Turns, ByItsPast])
def test_steps_that_leave_out_sequences_leave_the_distribution(
    kind: type[Turns] | type[ByItsPast], method: str
) -> None:
    made: list[Turns | ByItsPast] = []

    def build() -> Engine:
        made.append(kind())
        return engine(made[-1], method)

    assert distance_under(build, method) < EXACT
    assert any(policy.waits for policy in made)


@pytest.mark.parametrize("method", METHODS)
def test_leaving_out_by_the_tokens_of_the_draft_is_caught(method: str) -> None:
    assert distance_under(lambda: engine(ByTheDraft(), method), method) > SEEN


@pytest.mark.parametrize("mode", ["sequential", "pipelined", "draft-ahead", "draft-for-outcomes"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_token_for_token(mode: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=11)
    requests = [make_request(f"r{n}", (n % 5, 1, 2, n % 3), params) for n in range(6)]
    policy = Turns()
    made = engine(policy, size=6)
    made = made if mode == "sequential" else under(made, mode)
    assert tokens_of(run_all(made, requests)) == tokens_of(run_all(toy_engine(target(6), None), requests))
    assert policy.waits


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_no_sequence_starves(in_flight: int) -> None:
    """All sequences are served in turns, also where each microbatch leaves out some."""
    requests = [make_request(f"r{n}", (n % 5, 1, 2, n % 3), SamplingParams(max_tokens=48)) for n in range(8)]
    policy = Turns()
    made = engine(policy, size=6)
    made = made if in_flight == 1 else with_steps_in_flight(made, in_flight)
    for request in requests:
        made.add(request)
    for _ in range(120):
        made.step()
    lengths = [sequence.output_len for sequence in made.scheduler.running]
    assert policy.waits and len(lengths) == 8
    assert min(lengths) > max(lengths) / 2 > 3, lengths
    made.close()
