"""Heads keep the target's distribution, with lengths and trees that follow acceptance rates per head.

The heads are Medusa's, over hidden states of the toy model; their tokens are chosen, not drawn.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cospec.acceptance.rejection import Rejection
from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.model_io import TokenBatch
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import BatchState, Draft, DraftBudget, Request, SpeculationParams, TargetProbs, VerifyResult
from cospec.drafters.medusa import MedusaDrafter
from cospec.models.medusa_heads import MedusaHeads, MedusaRunner
from cospec.models.toy import ToyModel
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels
from cospec.policies.policy_build_context import PolicyContext
from cospec.rng.random_streams import RandomStreams
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import total_variation
from harness.policies import with_policy
from harness.reference import joint_distribution_of
from harness.toys import (
    enumerated_distribution_among,
    make_request,
    run_all,
    tokens_of,
    toy_engine,
    verifier_of,
    with_pool,
)

EXACT, SEEN = 1e-12, 1e-3
LENGTH, HEADS, HIDDEN = 4, 3, 4
PROMPT = (0, 1, 0)
PARAMS = SamplingParams(max_tokens=6, temperature=0.9)
ACCURACY = ((0.7, 0.3), (0.6, 0.4), (0.55, 0.45))
# Each verified token has a price, so the shares of the heads decide how many to verify.
COSTS = LatencyModels(ForwardLatency(slopes=(0.08,), fixed=0.3), ForwardLatency(fixed=1e-3))


class HiddenToy(ToyModel):
    """A toy model with a hidden state per row, which the last two tokens determine."""

    def forward(self, batch: TokenBatch) -> Tensor:
        logits = super().forward(batch)
        ends = [self.context(part, row)[-2:] for part in batch.slices for row in self._rows(part)]
        states = torch.randn(self.vocab_size, self.vocab_size, HIDDEN, generator=torch.Generator().manual_seed(11))
        self.hidden_states = torch.stack([states[tuple(end)] for end in ends]) if ends else None
        return logits


class Noted(Goodput):
    """``goodput`` with rates per head; notes depth and size of its drafts."""

    def __init__(self) -> None:
        context = PolicyContext(
            num_speculative_tokens=HEADS, max_nodes=5, costs=COSTS, capabilities=MedusaDrafter.capabilities
        )
        super().__init__(GoodputOptions(per_position=True, probe_share=0.3), context)
        self.shapes: set[tuple[int, int]] = set()

    def plan(self, load: BatchState) -> list[DraftBudget]:
        budgets = super().plan(load)
        self.shapes.update((budget.depth, budget.max_nodes) for budget in budgets)
        return budgets


class TrustsSureHeads(Rejection):
    """Keeps the token of a head whose rate is high untested: what no method may do."""

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        assert draft.confidence is not None
        sure = target.distribution.copy()
        for node in (node for node, rate in enumerate(draft.confidence) if rate > 0.65):
            sure[node] = 0.0
            sure[node, draft.tokens[node]] = 1.0
        return super().verify(draft, replace(target, probs=sure), draws)


def target(size: int = 2) -> HiddenToy:
    model = HiddenToy(size, order=2, seed=1)
    with_pool(model, 200, 4)
    return model


def heads(size: int = 2) -> MedusaDrafter:
    generator = torch.Generator().manual_seed(3)
    weight, bias = (
        torch.randn(HEADS, HIDDEN, HIDDEN, generator=generator),
        torch.randn(HEADS, HIDDEN, generator=generator),
    )
    embedding = torch.randn(size, HIDDEN, generator=generator)
    return MedusaDrafter(MedusaRunner(MedusaHeads(weight, bias, ACCURACY), embedding, torch.device("cpu")), ACCURACY)


def engine(policy: Goodput, method: str = "auto", size: int = 2) -> Engine:
    ticks = itertools.count()
    speculative = SpeculativeConfig(
        num_speculative_tokens=HEADS, max_nodes=5, acceptance_method=method, policy="fixed", execution_mode="sequential"
    )
    parts = assemble(target(size), heads(size), speculative, EngineConfig(), TextInfo())
    made = Engine(replace(parts, clock=lambda: 0.3 * next(ticks)))  # every step is long enough for a review
    return with_policy(made, policy)


def distance(method: str, wrong: AcceptanceMethod | None = None) -> tuple[float, set[tuple[int, int]], int]:
    """Distance from the target's distribution, the shapes of all drafts, and the number of accepted tokens."""
    chosen = SpeculationParams(acceptance_method=method)
    company = [Request("a", (1, 1, 0), SamplingParams(max_tokens=3), 1, speculation=chosen)]
    request = Request("z", PROMPT, PARAMS, 99, arrival=1.0, speculation=chosen)
    made: list[tuple[Noted, Engine]] = []

    def build() -> Engine:
        policy = Noted()
        made.append((policy, engine(policy, method)))
        if wrong is not None:
            verifier_of(made[-1][1]).acceptance_methods = {method: wrong}
        return made[-1][1]

    found = enumerated_distribution_among(build, company, request, LENGTH)
    apart = total_variation(found, joint_distribution_of(target(), PARAMS, PROMPT, LENGTH))
    accepted = sum(sum(each.metrics().accepted_tokens.values()) for _, each in made)
    return apart, set().union(*(policy.shapes for policy, _ in made)), accepted


@pytest.mark.parametrize("method", ["rejection", "block", "recursive", "match"])
def test_lengths_by_rates_per_head_leave_the_distribution(method: str) -> None:
    apart, shapes, accepted = distance(method)
    assert apart < EXACT
    assert len({shape for shape in shapes if shape[0]}) > 1, "the rates change the drafts"
    assert accepted


def test_a_head_that_is_trusted_for_its_rate_is_caught() -> None:
    assert distance("rejection", TrustsSureHeads())[0] > SEEN


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_token_for_token(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=11)
    requests = [make_request(f"r{n}", (n % 5, 1, 2, n % 3), params) for n in range(6)]
    plain = tokens_of(run_all(toy_engine(target(6), None), requests))
    made = engine(Noted(), size=6)
    assert tokens_of(run_all(made, requests)) == plain
    assert sum(made.metrics().accepted_tokens.values()) > 0
