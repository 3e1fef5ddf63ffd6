"""Replacements of models: a drafter and a verifier that know the correct tokens, and the latency of each.

Tokens are dummies: every token of an output is ``RIGHT``. A drafter proposes ``RIGHT`` for a correct token, else
``WRONG``. The verifier keeps correct tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cospec.acceptance.match import Match
from cospec.core.interfaces import BlockManager, NativeForward, PipelinedModel
from cospec.core.model_io import RolloutOutput, RolloutParams, TokenBatch
from cospec.core.plugins import AcceptanceMethod, Drafter
from cospec.core.submitted_step import FinishedFuture, Future
from cospec.core.types import (
    Commit,
    Draft,
    DraftBudget,
    DraftContext,
    DrafterCapabilities,
    RequestState,
    ScheduledRequest,
    StepOutput,
    VerifyResult,
)
from cospec.policies.latency.forward import ForwardLatency
from cospec.simulation.clock import SimulatedFuture, SimulatedPipeline, VirtualClock
from cospec.simulation.scenario import DrafterConfig, TargetConfig
from cospec.simulation.workload import SimulatedRequest

RIGHT, WRONG = 1, 0
CAPABILITIES = {
    "model": DrafterCapabilities(),
    "heads": DrafterCapabilities(single_pass=True, trees=True),
    "lookup": DrafterCapabilities(costless=True),
}
Rates = float | Sequence[float]


class SimulatedModel:
    """Replaces the target model; holds only the cache's pages."""

    def __init__(self, pages: BlockManager) -> None:
        self.pages, self.max_len = pages, 1 << 20
        self.name, self.vocab_size, self.dtype = "simulated", 2, torch.float32
        self.states: torch.Tensor | None = None
        self.native_forward: NativeForward | None = None
        self.pipelined: PipelinedModel | None = None
        self.has_rollout = False
        self.device = torch.device("cpu")

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """Never called: the verifier needs no logits."""
        raise NotImplementedError

    def rollout(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        """Never called."""
        raise NotImplementedError

    def commit(self, commits: Sequence[Commit]) -> None:
        """Nothing to do: there is no cache."""

    def free(self, ids: Sequence[str]) -> None:
        """Free the pages."""
        for id in ids:
            self.pages.free(id)


class SimulatedDrafter(Drafter):
    """Drafts correct tokens according to the difficulty of its requests.

    Args:
        rates: α by domain: one number, or one number per draft position.
    """

    name = "simulated"
    samples = False
    reads_states = False
    drafts_ahead = True
    learns = False

    def __init__(
        self, drafting: DrafterConfig, cost: ForwardLatency, clock: VirtualClock, rates: Mapping[str, Rates]
    ) -> None:
        self.capabilities = CAPABILITIES[drafting.kind]
        self.requests: dict[str, SimulatedRequest] = {}
        self.busy = 0.0  # seconds of proposals in turn with the target
        self._cost, self._clock, self._rates = cost, clock, rates
        self._fed: dict[str, int] = {}

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Draft while the target waits."""
        self.busy += self._clock.advance(self.seconds(contexts, budgets))
        return self.drafts(contexts, budgets)

    def seconds(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> float:
        """Return the seconds of one pass over new context, and one pass per further token of the longest drafts."""
        if self.capabilities.costless:
            return 0.0
        context = sum(len(each.tokens) for each in contexts)
        if self.capabilities.single_pass:
            return self._cost.seconds(0, sum(budget.max_nodes for budget in budgets), len(budgets))
        fed = [self._fed.get(each.id, 0) for each in contexts]
        for each in contexts:
            self._fed[each.id] = each.committed_len
        new = sum(len(each.tokens) for each in contexts) - sum(fed)
        total = self._cost.seconds(sum(fed), new, len(contexts))
        depths = sorted(budget.depth for budget in budgets)
        for step in range(1, depths[-1]):
            active = sum(depth > step for depth in depths)
            total += self._cost.each(context * active / len(depths), active)
        return total

    def drafts(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return a chain for each context, or a tree if the budget has widths."""
        return [
            self._tree(context, budget) if budget.widths else self._chain(context, budget)
            for context, budget in zip(contexts, budgets, strict=True)
        ]

    def correct_tokens(self, id: str, position: int, depth: int) -> int:
        """Return how many tokens after ``position`` of the output a draft of ``depth`` would get right."""
        request = self.requests[id]
        rates, difficulty = self._rates[request.domain.name], request.difficulty
        for place in range(min(depth, len(difficulty) - position)):
            if difficulty[position + place] >= (
                rates if isinstance(rates, float) else rates[min(place, len(rates) - 1)]
            ):
                return place
        return min(depth, len(difficulty) - position)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Nothing to do: the next proposal feeds committed tokens."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences."""
        for id in ids:
            self._fed.pop(id, None)

    def _chain(self, context: DraftContext, budget: DraftBudget) -> Draft:
        n = budget.depth
        right = self.correct_tokens(context.id, len(context.tokens) - context.prompt_len, n)
        tokens = (RIGHT,) * right + (WRONG,) * (n - right)
        return Draft(context.id, len(context.tokens), tokens, tuple(range(-1, n - 1)), (self.name,) * n)

    def _tree(self, context: DraftContext, budget: DraftBudget) -> Draft:
        """Build a tree: all nodes of a level have the same number of children; a correct token is a first child."""
        request, position = self.requests[context.id], len(context.tokens) - context.prompt_len
        rate = self._rates[request.domain.name]
        tokens: list[int] = []
        parents: list[int] = []
        above = [-1]
        for level, width in enumerate(budget.widths):
            if len(tokens) >= budget.max_nodes:
                break
            alpha = rate if isinstance(rate, float) else rate[min(level, len(rate) - 1)]
            place = position + level
            first_accepted = (
                place < len(request.difficulty) and request.difficulty[place] < 1.0 - (1.0 - alpha) ** width
            )
            nodes = []
            for parent in above:
                for child in range(min(width, budget.max_nodes - len(tokens))):
                    good = first_accepted and child == 0 and (parent < 0 or tokens[parent] == RIGHT)
                    nodes.append(len(tokens))
                    tokens.append(RIGHT if good else WRONG)
                    parents.append(parent)
            above = nodes
        return Draft(context.id, len(context.tokens), tuple(tokens), tuple(parents), (self.name,) * len(tokens))


class SimulatedVerifier:
    """Keeps correct tokens, after the time of the target's forward.

    With one step in flight the step blocks the clock. With several, each enters the pipeline and leaves it later.
    """

    def __init__(self, cache: SimulatedModel, target: TargetConfig, cost: ForwardLatency, clock: VirtualClock) -> None:
        self._cache, self._target, self._cost, self._clock = cache, target, cost, clock
        self._rule = Match()
        self._busy = 0.0
        self._pipeline = SimulatedPipeline(clock, target.stages)
        self.max_in_flight = target.steps_in_flight

    @property
    def busy(self) -> float:
        """Seconds in which the target worked."""
        return self._busy + self._pipeline.busy

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """Return the acceptance method of greedy requests."""
        return self._rule

    def submit(self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> Future[list[StepOutput]]:
        """Return one output per entry."""
        context = tokens = 0
        outputs = []
        for entry in entries:
            sequence = entry.sequence
            draft = drafts.get(sequence.request.id)
            context += sequence.computed
            tokens += entry.tokens
            if not entry.reaches_end or draft is None or draft.base_len != len(sequence.tokens) or not draft.tokens:
                result = VerifyResult((), RIGHT, False) if entry.reaches_end else None
                outputs.append(StepOutput(entry, None, result))
                continue
            tokens += len(draft.tokens)
            path = _right_path(draft)
            outputs.append(StepOutput(entry, draft, VerifyResult(path, RIGHT, _is_full_path(draft, path))))
        microbatches, seconds = self._microbatches(context, tokens, len(entries))
        if self.max_in_flight > 1:
            moment = self._pipeline.enter(microbatches, seconds) - self._target.link
            self._clock.advance(self._target.overhead)
            return SimulatedFuture(self._clock, moment, outputs)
        alone = (microbatches + self._target.stages - 1) * seconds - self._target.link
        self._busy += self._clock.advance(alone)
        self._clock.advance(self._target.overhead)
        return FinishedFuture(outputs)

    def _microbatches(self, context: float, tokens: float, sequences: int) -> tuple[int, float]:
        """Return the microbatches of a step, at most one per sequence, and the seconds of each in one stage.

        The microbatches of all steps in flight occupy every stage. A stage sends its result over the link itself.
        """
        stages = self._target.stages
        parts = min(-(-stages // self.max_in_flight), max(1, sequences))
        stage = self._cost.seconds(context / parts, tokens / parts, sequences / parts) / stages
        return parts, stage + self._target.link

    def commit(self, commits: Sequence[Commit]) -> None:
        """Nothing to do: there is no cache."""

    def free(self, ids: Sequence[str]) -> None:
        """Free the pages."""
        self._cache.free(ids)


def _right_path(draft: Draft) -> tuple[int, ...]:
    if draft.is_chain:
        tokens = draft.tokens
        return tuple(range(tokens.index(WRONG) if WRONG in tokens else len(tokens)))
    path: list[int] = []
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if token == RIGHT and parent == (path[-1] if path else -1):
            path.append(node)
    return tuple(path)


def _is_full_path(draft: Draft, path: Sequence[int]) -> bool:
    """Whether the path ends at a leaf, so that the next token is a bonus token."""
    return (path[-1] if path else -1) not in draft.parents
