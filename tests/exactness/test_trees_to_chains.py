"""A draft tree that is ready when the plan wants a chain: its drawn tokens do not decide which of them are verified."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import torch

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.types import BatchState, Draft, DraftBudget, Request, SpeculationParams
from cospec.drafters.draft_subtrees import cut
from cospec.drafters.model import ModelDrafter
from cospec.execution import draft_buffer
from cospec.execution.draft_buffer import best_path, fit_to_budget
from cospec.models.toy import ToyModel
from cospec.policies.fixed import Off
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import total_variation
from harness.overlap import under
from harness.reference import joint_distribution_of
from harness.toys import enumerated_distribution_among, with_pool

EXACT, SEEN = 1e-12, 1e-2
PARAMS, PROMPT, LENGTH = SamplingParams(max_tokens=5, temperature=0.9), (0, 1, 0), 3
TREE, CHAIN, SMALLER = DraftBudget(2, 6, (2, 2)), DraftBudget(2, 2), DraftBudget(2, 3, (2, 1))


class Alternating(Off):
    """Plans a tree and another budget in turn."""

    def __init__(self, other: DraftBudget) -> None:
        super().__init__()
        self._budgets, self._plans = (other, TREE), 0

    def plan(self, load: BatchState) -> list[DraftBudget]:
        self._plans += 1
        return [self._budgets[self._plans % 2]] * len(load.ready)


def target() -> ToyModel:
    return with_pool(ToyModel(2, order=2, seed=1), 200, 4)


def made(other: DraftBudget) -> Engine:
    """An engine of two words, whose drafter is sure after one of them alone: so paths have different values."""
    toy, ticks = with_pool(ToyModel(2, order=1, seed=5, sharpness=2.5), 200, 4), count()
    toy.table = torch.tensor([[0.05, 0.0], [4.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    speculative = SpeculativeConfig(
        acceptance_method="recursive", policy="fixed", num_speculative_tokens=2, max_nodes=6, widths=(2, 2)
    )
    parts = assemble(target(), ModelDrafter(toy), speculative, EngineConfig(), TextInfo())
    engine, policy = Engine(replace(parts, clock=lambda: next(ticks) * 1e-3)), Alternating(other)
    engine.scheduler.policy = policy
    engine.execution_mode.components = replace(engine.execution_mode.components, policy=policy)
    return under(engine, "pipelined")


def distance(other: DraftBudget) -> float:
    """Total variation between the outputs of a request among two others and the target's distribution."""
    chosen = SpeculationParams(acceptance_method="recursive")
    company = [
        Request(id, (1, 1, 0), SamplingParams(max_tokens=24), seed, speculation=chosen)
        for seed, id in enumerate("ab", start=1)
    ]
    request = Request("z", PROMPT, PARAMS, 99, arrival=1.0, speculation=chosen)
    found = enumerated_distribution_among(lambda: made(other), company, request, LENGTH)
    return total_variation(found, joint_distribution_of(target(), PARAMS, PROMPT, LENGTH))


@pytest.mark.parametrize("other", [CHAIN, SMALLER])
def test_the_distribution_is_kept(other: DraftBudget) -> None:
    assert distance(other) < EXACT


def test_the_best_path_of_drawn_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_value(draft: Draft | None, budget: DraftBudget) -> Draft | None:
        """Wrong on purpose: a sibling is chosen by what was drawn below it."""
        if draft is None or draft.is_chain or not budget.is_chain:
            return fit_to_budget(draft, budget)
        return cut(draft, best_path(draft)[: budget.depth])

    monkeypatch.setattr(draft_buffer, "fit_to_budget", by_value)
    assert distance(CHAIN) > SEEN
