"""A limit of the draft length that grows with the accepted tokens leaves the distribution unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.types import BatchState, Draft, DraftBudget, Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.execution.sequential import Sequential
from cospec.models.toy import ToyModel
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels
from cospec.policies.policy_build_context import PolicyContext
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import total_variation
from harness.reference import joint_distribution_of
from harness.toys import enumerated_distribution_among, with_pool

EXACT, SEEN = 1e-12, 1e-3
LENGTH = 4
PROMPT = (0, 1, 0)
PARAMS = SamplingParams(max_tokens=6, temperature=0.9)
SLOW_TARGET = LatencyModels(ForwardLatency(slopes=(1e-6,), fixed=3.0), ForwardLatency(slopes=(1e-6,), fixed=1e-2))
METHODS = ("rejection", "block")


class ShortFirst(PolicyContext):
    """The default limit is one token, so that few tokens suffice to let the limit grow."""

    longest = 1


class Growing(Goodput):
    """``goodput`` with a record of the longest drafts."""

    def __init__(self) -> None:
        super().__init__(GoodputOptions(probe_share=0.0), ShortFirst(costs=SLOW_TARGET))
        self.longest = 0

    def plan(self, load: BatchState) -> list[DraftBudget]:
        budgets = super().plan(load)
        self.longest = max(self.longest, *(budget.depth for budget in budgets), 0)
        return budgets


class GrowingByTheDraft(Growing):
    """Lets a draft grow only where the tokens of the longer draft are word 0: what no policy may do."""

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        return [_head(draft, 1) if any(draft.tokens[1:]) else draft for draft in drafts]


def _head(draft: Draft, keep: int) -> Draft:
    assert draft.q is not None
    return replace(
        draft,
        tokens=draft.tokens[:keep],
        parents=draft.parents[:keep],
        drafters=draft.drafters[:keep],
        q=draft.q[:keep],
    )


def target() -> ToyModel:
    return with_pool(ToyModel(2, order=2, seed=1), 200, 4)


def engine(policy: Growing, method: str) -> Engine:
    ticks = itertools.count()
    drafter = ModelDrafter(with_pool(ToyModel(2, order=1, seed=5, sharpness=1.5), 200, 4))
    speculative = SpeculativeConfig(acceptance_method=method, policy="fixed", execution_mode="sequential")
    parts = assemble(target(), drafter, speculative, EngineConfig(), TextInfo())
    made = Engine(replace(parts, clock=lambda: float(next(ticks))))  # every step is long enough for a review
    made.scheduler.policy = policy
    made.execution_mode = Sequential(replace(made.execution_mode.components, policy=policy))
    return made


def distance_under(kind: type[Growing], method: str) -> tuple[float, Sequence[int]]:
    """Distance from the target's distribution, and the longest draft on each path."""
    chosen = SpeculationParams(acceptance_method=method)
    company = [Request("a", (1, 1, 0), SamplingParams(max_tokens=3), 1, speculation=chosen)]
    request = Request("z", PROMPT, PARAMS, 99, arrival=1.0, speculation=chosen)
    policies: list[Growing] = []

    def build() -> Engine:
        policies.append(kind())
        return engine(policies[-1], method)

    found = enumerated_distribution_among(build, company, request, LENGTH)
    distance = total_variation(found, joint_distribution_of(target(), PARAMS, PROMPT, LENGTH))
    return distance, [policy.longest for policy in policies]


@pytest.mark.parametrize("method", METHODS)
def test_drafts_that_grow_leave_the_distribution(method: str) -> None:
    distance, longest = distance_under(Growing, method)
    assert distance < EXACT
    assert max(longest) >= 4, "the limit grew twice"


@pytest.mark.parametrize("method", METHODS)
def test_growth_by_the_tokens_of_the_draft_is_caught(method: str) -> None:
    assert distance_under(GrowingByTheDraft, method)[0] > SEEN
