"""Simulated drafters: the time of a model's passes, and a drafter that is right with a given probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.plugin_base import Drafter
from cospec.core.tree import level_nodes
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.policies.latency.forward import ForwardLatency
from cospec.simulation.clock import VirtualClock
from cospec.simulation.recorded_drafts import Recording
from cospec.simulation.scenario import DrafterConfig
from cospec.simulation.simulated_outcome_drafts import Guess, branches, outcome_draft
from cospec.simulation.workload import SimulatedRequest

SMALLEST_VOCAB = 2  # tokens without a recording: 0 and ``FILLER``
CAPABILITIES = {
    "model": DrafterCapabilities(),
    "heads": DrafterCapabilities(single_pass=True, trees=True),
    "lookup": DrafterCapabilities(costless=True),
}
Rates = float | Sequence[float]


@dataclass(frozen=True, slots=True)
class DrafterSetting:
    """What simulated drafters and models read.

    Attributes:
        requests: the requests of the engine, by id.
        rates: α by domain, for drafters that are not recorded.
        folder: of the scenario, the base of relative paths.
    """

    clock: VirtualClock
    requests: Mapping[str, SimulatedRequest]
    rates: Mapping[str, Rates]
    folder: Path
    recording: Recording | None

    @property
    def vocab_size(self) -> int:
        """Tokens that outputs may have; the next ids are wrong tokens."""
        return SMALLEST_VOCAB if self.recording is None else self.recording.vocab_size


class DraftPasses:
    """The seconds of a small model's passes.

    Attributes:
        fed: tokens that the model has read, by sequence.
    """

    def __init__(self, cost: ForwardLatency) -> None:
        self.cost = cost
        self.fed: dict[str, int] = {}

    def read(self, contexts: Sequence[DraftContext], again: int = 0) -> float:
        """Return the seconds of one pass over the new tokens, and over at least ``again`` tokens of each sequence."""
        fed = [min(self.fed.get(each.id, 0), max(0, len(each.tokens) - again)) for each in contexts]
        for each in contexts:
            self.fed[each.id] = each.committed_len
        new = sum(len(each.tokens) for each in contexts) - sum(fed)
        return self.cost.seconds(sum(fed), new, len(contexts))

    def chains(self, contexts: Sequence[DraftContext], depths: Sequence[int]) -> float:
        """Return the seconds of one pass over new tokens, and of one pass per further token of the longest drafts."""
        context, ordered = sum(len(each.tokens) for each in contexts), sorted(depths)
        total = self.read(contexts)
        for step in range(1, ordered[-1]):
            active = sum(depth > step for depth in ordered)
            total += self.cost.each(context * active / len(ordered), active)
        return total

    def proposal(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> float:
        """Return the seconds of a proposal: of chains, trees with widths, or drafts after outcomes."""
        if any(budget.outcomes for budget in budgets):
            return self.outcomes(contexts, budgets)
        if any(budget.widths for budget in budgets):
            return self.trees(contexts, budgets)
        return self.chains(contexts, [budget.depth for budget in budgets])

    def outcomes(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> float:
        """Return the seconds of one pass over new tokens, and of one pass per further level over all branches."""
        context, total = sum(len(each.tokens) for each in contexts) / len(contexts), self.read(contexts)
        pairs = list(zip(contexts, budgets, strict=True))
        for level in range(1, max(budget.depth for budget in budgets)):
            rows = [branches(*pair) if pair[1].outcomes else 1 for pair in pairs if pair[1].depth > level]
            total += self.cost.each(context * len(rows), sum(rows))
        return total

    def trees(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> float:
        """Return the seconds of one pass over new tokens, and of one pass per further level.

        A pass computes all levels of a tree before, as a model drafter does, and the latest token of a chain.
        """
        context, total = sum(len(each.tokens) for each in contexts) / len(contexts), self.read(contexts)
        for level in range(1, max(budget.depth for budget in budgets)):
            active = [budget.widths for budget in budgets if budget.depth > level]
            fed = [level_nodes(widths, level) if widths else 1 for widths in active]
            total += self.cost.each(context * len(fed), sum(fed))
        return total


class SimulatedDrafter(Drafter):
    """Drafts correct tokens according to the difficulty of its requests."""

    name = "simulated"
    samples = False
    reads_hidden_states = False
    drafts_ahead = True
    drafts_for_outcomes = True
    learns = False

    def __init__(self, drafting: DrafterConfig, cost: ForwardLatency, setting: DrafterSetting) -> None:
        self.capabilities = CAPABILITIES[drafting.kind]
        self.busy = 0.0  # seconds of proposals
        self._requests, self._rates, self._clock = setting.requests, setting.rates, setting.clock
        self._passes, self._wrong = DraftPasses(cost), setting.vocab_size

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return a chain for each context, or a tree if the budget has widths."""
        self.busy += self._clock.advance(self._seconds(contexts, budgets))
        return [self._draft(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def _draft(self, context: DraftContext, budget: DraftBudget) -> Draft:
        if budget.outcomes:
            return self._outcomes(context, budget)
        return self._tree(context, budget) if budget.widths else self._chain(context, budget)

    def _seconds(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> float:
        if self.capabilities.costless:
            return 0.0
        if self.capabilities.single_pass:
            return self._passes.cost.seconds(0, sum(budget.max_nodes for budget in budgets), len(budgets))
        return self._passes.proposal(contexts, budgets)

    def correct_tokens(self, id: str, position: int, depth: int) -> int:
        """Return how many tokens after ``position`` of the output a draft of ``depth`` would get right."""
        request = self._requests[id]
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
            self._passes.fed.pop(id, None)

    def _chain(self, context: DraftContext, budget: DraftBudget) -> Draft:
        n = budget.depth
        place = len(context.tokens) - context.prompt_len
        right = self.correct_tokens(context.id, place, n)
        tokens = self._requests[context.id].output[place : place + right] + (self._wrong,) * (n - right)
        return Draft(context.id, len(context.tokens), tokens, tuple(range(-1, n - 1)), (self.name,) * n)

    def _outcomes(self, context: DraftContext, budget: DraftBudget) -> Draft:
        """Branch after each number of given tokens: guesses are right as often as siblings in a tree."""
        request = self._requests[context.id]
        rate = self._rates[request.domain.name]
        alpha = rate if isinstance(rate, float) else rate[0]
        further = alpha if request.domain.siblings is None else request.domain.siblings

        def guesses(place: int, given: int | None) -> list[Guess]:
            count = budget.widths[0] + (given is not None)
            hit = 1.0 - (1.0 - alpha) * (1.0 - further) ** (count - 1)
            right = request.output[place]
            return [(right, hit)] if request.difficulty[place] < hit and right != given else []

        def chain(place: int, most: int) -> list[Guess]:
            right = self.correct_tokens(context.id, place, most)
            return [(token, alpha) for token in (*request.output[place : place + right], self._wrong)[:most]]

        return outcome_draft(context, budget, self.name, request.output, guesses, chain)

    def _tree(self, context: DraftContext, budget: DraftBudget) -> Draft:
        """Build a tree: all nodes of a level have the same number of children, of which at most one is correct."""
        request, position = self._requests[context.id], len(context.tokens) - context.prompt_len
        rate = self._rates[request.domain.name]
        tokens: list[int] = []
        parents: list[int] = []
        above = [-1]
        for level, width in enumerate(budget.widths):
            if len(tokens) >= budget.max_nodes:
                break
            alpha = rate if isinstance(rate, float) else rate[min(level, len(rate) - 1)]
            place = position + level
            further = alpha if request.domain.siblings is None else request.domain.siblings
            hits = [1.0 - (1.0 - alpha) * (1.0 - further) ** child for child in range(width)]
            difficulty = request.difficulty[place] if place < len(request.difficulty) else 1.0
            right = sum([difficulty >= hit for hit in hits])  # the place of the correct child; ``width``: none is
            nodes = []
            for parent in above:
                for child in range(min(width, budget.max_nodes - len(tokens))):
                    good = child == right and (parent < 0 or tokens[parent] != self._wrong)
                    nodes.append(len(tokens))
                    tokens.append(request.output[place] if good else self._wrong)
                    parents.append(parent)
            above = nodes
        return Draft(context.id, len(context.tokens), tuple(tokens), tuple(parents), (self.name,) * len(tokens))
