"""Policies whose decisions follow what was accepted, and engines around them whose clocks count forwards.

Every path of an enumeration begins with a copy of the same taught policy, and sees the same seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.model_io import TokenBatch
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
from harness.enumerated_draws import OutputDistribution, total_variation
from harness.overlap import over_wire, under
from harness.reference import joint_distribution_of
from harness.toys import enumerated_distribution_among, run_all, with_pool

START = 2  # ends the prompt, and stands nowhere else
PROMPT = (0, 1, START)
PARAMS = SamplingParams(max_tokens=8, temperature=0.9)
WATCHED = "z"  # the request whose output is enumerated


class Timed(ToyModel):
    """A model of words 0 and 1 that counts seconds; sure of the word after ``START``, so paths are fewer."""

    def __init__(self, latency: ForwardLatency, order: int, seed: int, sharpness: float = 1.0) -> None:
        super().__init__(3, order, seed, sharpness)
        self.table[..., START] = -torch.inf
        self.table[..., START, :] = torch.tensor([-torch.inf, 0.0, -torch.inf])
        self.seconds, self._latency = 0.0, latency
        with_pool(self, 200, 4)

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        tokens = sum(len(part.tokens) for part in batch.slices)
        self.seconds += self._latency.seconds(0.0, tokens, len(batch.slices))
        return super().forward(batch)


def models(costs: LatencyModels) -> tuple[Timed, Timed]:
    """Target and drafter."""
    assert costs.target is not None and costs.draft is not None
    return Timed(costs.target, order=2, seed=1), Timed(costs.draft, order=1, seed=4, sharpness=0.5)


def head(draft: Draft, keep: int) -> Draft:
    """The first tokens of a chain."""
    q = None if draft.q is None else np.array(draft.q[:keep])
    return replace(draft, tokens=draft.tokens[:keep], parents=draft.parents[:keep], drafters=draft.drafters[:keep], q=q)


def cut_by_the_cut_token(drafts: Sequence[Draft]) -> list[Draft]:
    """Keep a last token only if it is word 0: what no policy may do."""
    kept = [head(draft, len(draft) - (draft.tokens[-1] != 0)) for draft in drafts]
    return [draft for draft in kept if len(draft)]


class ByItsOwnPast(Off):
    """Drafts long where the last draft of a sequence was accepted, short where it was not."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[str, int] = {}

    def plan(self, load: BatchState) -> list[DraftBudget]:
        found = [self.lengths.get(one.id, 1) for one in load.ready]
        return [DraftBudget(depth=k, max_nodes=k) for k in found]

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self.lengths[commit.id] = 2 if commit.path else 1


class Noted(Goodput):
    """``goodput`` that notes the budgets of the request whose output is enumerated."""

    def __init__(self, options: GoodputOptions, context: PolicyContext) -> None:
        super().__init__(options, context)
        self.noted: list[DraftBudget] = []

    def plan(self, load: BatchState) -> list[DraftBudget]:
        found = super().plan(load)
        self.noted += [budget for one, budget in zip(load.ready, found, strict=True) if one.id == WATCHED]
        return found


class NotedAndCut(Noted):
    """Cuts by the cut token."""

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        return cut_by_the_cut_token(drafts)


def with_policy(made: Engine, policy: Policy, clock: Callable[[], float] | None = None) -> Engine:
    """The engine with another policy, and another clock of its steps."""
    made.scheduler.policy = policy
    components = made.execution_mode.components
    made.execution_mode = Sequential(replace(components, policy=policy, clock=clock or components.clock))
    return made


def costs(draft_seconds: float) -> LatencyModels:
    """Forwards of any size take as long: 0.3 s of the target, longer than between two reviews of a policy."""
    return LatencyModels(ForwardLatency(fixed=0.3), ForwardLatency(fixed=draft_seconds))


# A forward with more tokens than those of one sequence and its draft takes far longer.
CROWDED = LatencyModels(
    ForwardLatency(slopes=(0.01, 3.0), knees=(2.0,), sequence=0.3, fixed=0.02), ForwardLatency(fixed=0.02)
)


@dataclass(frozen=True)
class Case:
    """An engine: its costs, its rule, and the order of drafting and verification.

    Attributes:
        costs: what forwards take on the clock, as the policy knows.
        options: of the policy.
        executor: as in ``harness.overlap``; "wired" puts the drafter at the other end of a wire in every mode.
        company_size: requests that arrive before the one whose output is enumerated.
        company_drafts: these requests may have drafts.
        length: tokens of the output that are enumerated.
        spoil: a mistake of the engine, none by default.
    """

    costs: LatencyModels
    options: GoodputOptions
    acceptance_method: str
    execution_mode: str = "sequential"
    executor: str = "inline"
    company_size: int = 0
    company_drafts: bool = True
    length: int = 4
    spoil: Callable[[Engine], Engine] = lambda made: made

    def engine(self, policy: Policy, seconds: Sequence[float] = (0.0, 0.0)) -> tuple[Engine, tuple[Timed, Timed]]:
        """The engine, its target and its drafter; ``seconds`` of both have passed."""
        made_models = models(self.costs)
        for model, before in zip(made_models, seconds, strict=True):
            model.seconds = before

        def clock() -> float:
            return sum(model.seconds for model in made_models)

        drafting = ModelDrafter(made_models[1])
        speculative = SpeculativeConfig(
            num_speculative_tokens=2,
            acceptance_method=self.acceptance_method,
            policy="fixed",
            execution_mode="sequential",
        )
        given = over_wire(drafting, clock) if self.executor == "wired" else drafting
        parts = assemble(made_models[0], given, speculative, EngineConfig(), TextInfo())
        made = with_policy(Engine(replace(parts, clock=clock)), policy, clock)
        executor = "process" if self.executor == "wired" else self.executor
        return self.spoil(under(made, self.execution_mode, executor)), made_models

    def requests(self, count: int, prefix: str, length: int, drafts: bool = True) -> list[Request]:
        """Requests with fixed random numbers."""
        chosen, params = (
            SpeculationParams(drafts, acceptance_method=self.acceptance_method),
            SamplingParams(max_tokens=length),
        )
        return [Request(f"{prefix}{n}", (n % 2, 1, START), params, n, speculation=chosen) for n in range(count)]

    def taught(self, cls: type[Noted]) -> tuple[Noted, list[float]]:
        """A policy that has seen three outputs, and the seconds so far."""
        policy = cls(self.options, PolicyContext(num_speculative_tokens=2, costs=self.costs))
        found, used = self.engine(policy)
        run_all(found, self.requests(3, "t", 24), check=False)
        return policy, [model.seconds for model in used]

    def distribution(self, build: Callable[[], Engine]) -> OutputDistribution:
        """Of the first tokens of a request in the company of others."""
        chosen = SpeculationParams(acceptance_method=self.acceptance_method)
        request = Request(WATCHED, PROMPT, PARAMS, 99, arrival=1.0, speculation=chosen)
        company = self.requests(self.company_size, "a", 24, self.company_drafts)
        return enumerated_distribution_among(build, company, request, self.length)

    def distance(self, cls: type[Noted]) -> tuple[float, list[list[DraftBudget]]]:
        """Total variation from the target distribution, and the budgets of each path; each has a copy of the policy."""
        policy, seconds = self.taught(cls)
        made: list[Noted] = []

        def build() -> Engine:
            made.append(deepcopy(policy))
            return self.engine(made[-1], seconds)[0]

        found = self.distribution(build)
        distance = total_variation(found, joint_distribution_of(models(self.costs)[0], PARAMS, PROMPT, self.length))
        return distance, [each.noted for each in made]
