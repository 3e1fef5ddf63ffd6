"""A drafter of a recording: proposes what the real drafter proposed, and takes the time of its passes.

Chains are replayed exactly: they follow committed tokens alone. A drafter that is led token by token follows a path.
While the path is right, the recorded first choices along the output are exact, with their second choices. After a wrong
token, which is never accepted, the candidates are those of the drafter's own chain.

Trees with widths have the recorded first and second choices, exact while the path is right. All other tokens of a tree
are wrong: nodes below a wrong token, which is exact, and third choices, which the real drafter sometimes has right. The
confidences of these nodes are assumed; a pool that cuts its tree compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cospec.core.drafter_capabilities import DrafterCapabilities, TokenScores
from cospec.core.interfaces import Model
from cospec.core.model_io import TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.draft_kv_cache import LOOKBACK
from cospec.drafters.interfaces import NextLogits
from cospec.policies.latency.forward import ForwardLatency
from cospec.simulation.clock import VirtualClock
from cospec.simulation.recorded_drafts import RecordedRequest, Recording
from cospec.simulation.simulated_drafter import DraftPasses
from cospec.simulation.simulated_outcome_drafts import Guess, outcome_draft
from cospec.simulation.workload import SimulatedRequest

LEAST = 1e-12  # probability of a token that no drafter chooses


class Choice(NamedTuple):
    """A drafter's likeliest token with its probability, and its second choice where the second choice is known."""

    token: int
    chance: float
    second: int | None = None
    second_chance: float = 0.0


class RecordedMember:
    """One drafter of a recording, and the requests of an engine."""

    def __init__(self, recording: Recording, name: str, requests: Mapping[str, SimulatedRequest]) -> None:
        self.recording, self._member, self._requests = recording, recording.member(name), requests

    def request(self, id: str) -> RecordedRequest:
        """Return the recorded request of a sequence."""
        number = self._requests[id].recorded
        assert number is not None, "a scenario with a recording has recorded requests"
        return self.recording.requests[number]

    def chain(self, id: str, place: int) -> tuple[list[int], list[float]]:
        """Return the chain after ``place`` output tokens, and its confidences; empty after the end of the output."""
        request = self.request(id)
        if place >= len(request.output):
            return [], []
        row = request.first + place
        tokens, confidence = self.recording.tokens[self._member, row], self.recording.confidence[self._member, row]
        return tokens.tolist(), confidence.tolist()

    def choice(self, id: str, place: int, path: Sequence[int]) -> Choice:
        """Return the choice after ``place`` output tokens and a path of draft tokens."""
        output = self.request(id).output[place : place + len(path)]
        wrong = next((n for n, (token, right) in enumerate(zip(path, output, strict=False)) if token != right), None)
        right = len(output) if wrong is None else wrong
        tokens, confidence = self.chain(id, place + right)
        ahead = len(path) - right
        if ahead >= len(tokens):
            return Choice(0, LEAST)
        if ahead:
            return Choice(tokens[ahead], confidence[ahead])
        row, recording = self.request(id).first + place + right, self.recording
        second, chance = recording.second[self._member, row], recording.second_confidence[self._member, row]
        return Choice(tokens[0], confidence[0], int(second), float(chance))

    def choices(self, id: str, place: int, path: Sequence[int], count: int) -> list[tuple[int, float]]:
        """Return ``count`` choices after a path with their probabilities.

        Choices that are not recorded are wrong, and each takes half of the probability that is left.
        """
        first, request = self.choice(id, place, path), self.request(id)
        found = [(first.token, first.chance)]
        if first.second is not None:
            found.append((first.second, first.second_chance))
        known = {token for token, _ in found} | set(request.output[place + len(path) :][:1])
        left = 1.0 - sum(chance for _, chance in found)
        for token in range(self.recording.vocab_size):
            if len(found) >= count:
                break
            if token not in known:
                left /= 2.0
                found.append((token, max(LEAST, left)))
        return found[:count]

    def scores(self, id: str, first: int, end: int) -> TokenScores:
        """Return the probability of the known tokens ``first`` to ``end``."""
        start = self.request(id).start
        chances = self.recording.known[self._member, start + first : start + end]
        return TokenScores(float(chances.sum()), end - first)


class RecordedDrafter(Drafter):
    """Whole drafts of one recorded drafter.

    Attributes:
        busy: seconds of proposals, those of steppers included.
    """

    samples = True
    reads_hidden_states = False
    drafts_ahead = True
    learns = False
    scores_known_tokens = True
    drafts_for_outcomes = True
    capabilities = DrafterCapabilities()

    def __init__(self, member: RecordedMember, name: str, cost: ForwardLatency, clock: VirtualClock) -> None:
        self.name, self.busy = name, 0.0
        self._member, self._clock, self._passes = member, clock, DraftPasses(cost)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return the recorded chain of each context, at most as long as recorded chains are.

        Drafts after outcomes have the recorded first and second choices as guesses.
        """
        self.spend(self._passes.proposal(contexts, budgets))
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            if budget.outcomes or budget.widths:
                drafts.append((self._outcomes if budget.outcomes else self._tree)(context, budget))
                continue
            tokens, confidence = self._member.chain(context.id, len(context.tokens) - context.prompt_len)
            n = min(len(tokens), budget.depth, budget.max_nodes)
            known = np.array(confidence[:n]) if budget.confident else None
            parents, names = tuple(range(-1, n - 1)), (self.name,) * n
            drafts.append(Draft(context.id, len(context.tokens), tuple(tokens[:n]), parents, names, None, known))
        return [draft for draft in drafts if draft.tokens]

    def _tree(self, context: DraftContext, budget: DraftBudget) -> Draft:
        """Return the level tree, cut to the node budget."""
        place = len(context.tokens) - context.prompt_len
        tokens, parents, confidence = list[int](), list[int](), list[float]()
        above: list[tuple[int, tuple[int, ...]]] = [(-1, ())]  # nodes of the level above, and their paths
        for width in (budget.widths + (1,) * budget.depth)[: budget.depth]:
            below = list[tuple[int, tuple[int, ...]]]()
            for parent, path in above:
                for token, sure in self._member.choices(context.id, place, path, width):
                    if len(tokens) < budget.max_nodes:
                        below.append((len(tokens), (*path, token)))
                        tokens.append(token)
                        parents.append(parent)
                        confidence.append(sure)
            above = below
        names = (self.name,) * len(tokens)
        return Draft(context.id, len(context.tokens), tuple(tokens), tuple(parents), names, None, np.array(confidence))

    def _outcomes(self, context: DraftContext, budget: DraftBudget) -> Draft:
        member, id = self._member, context.id

        def guesses(place: int, given: int | None) -> list[Guess]:
            choice = member.choice(id, place, ())
            found = [(choice.token, choice.chance)]
            return found if choice.second is None else [*found, (choice.second, choice.second_chance)]

        def chain(place: int, most: int) -> list[Guess]:
            return list(zip(*member.chain(id, place), strict=True))[:most]

        return outcome_draft(context, budget, self.name, member.request(id).output, guesses, chain)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Do nothing: the next proposal reads committed tokens."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences."""
        for id in ids:
            self._passes.fed.pop(id, None)

    def spend(self, seconds: float) -> None:
        """Advance the clock by the drafter's work."""
        self.busy += self._clock.advance(seconds)

    def stepper(self) -> RecordedStepper:
        """Return the stepwise interface."""
        return RecordedStepper(self, self._member, self._passes)

    def score_known_tokens(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        """Return the recorded scores of the latest known tokens, see ``drafters.known_token_scores``."""
        self.spend(self._passes.read(contexts, LOOKBACK + 1))
        return {
            each.id: self._member.scores(each.id, max(1, len(each.tokens) - LOOKBACK), len(each.tokens))
            for each in contexts
        }


class RecordedStepper:
    """Drafts token by token: rows of logits with the recorded first and second choice."""

    def __init__(self, drafter: RecordedDrafter, member: RecordedMember, passes: DraftPasses) -> None:
        self._drafter, self._member, self._passes = drafter, member, passes
        self._paths: dict[str, tuple[int, list[int]]] = {}  # output tokens and path, by sequence
        self._context = 0.0  # mean tokens of the opened sequences

    @property
    def model(self) -> Model:
        """Never read: a simulated pool makes no native calls."""
        raise NotImplementedError

    def open(self, contexts: Sequence[DraftContext], depths: Sequence[int]) -> NextLogits:
        """See ``StepwiseDrafter``."""
        self._drafter.spend(self._passes.read(contexts))
        self._context = sum(len(context.tokens) for context in contexts) / len(contexts)
        self._paths = {each.id: (len(each.tokens) - each.prompt_len, []) for each in contexts}
        return NextLogits(tuple(self._paths), self._rows(tuple(self._paths)))

    def feed(self, ids: Sequence[str], tokens: Sequence[int]) -> Tensor:
        """See ``StepwiseDrafter``."""
        self._drafter.spend(self._passes.cost.each(self._context * len(ids), len(ids)))
        for id, token in zip(ids, tokens, strict=True):
            self._paths[id][1].append(token)
        return self._rows(ids)

    def prepare(self, contexts: Sequence[DraftContext], depths: Sequence[int]) -> TokenBatch:
        """Never called: there is no batch without a model."""
        raise NotImplementedError

    def extend(self, ids: Sequence[str], paths: Sequence[Sequence[int]]) -> None:
        """Never called."""
        raise NotImplementedError

    def score_known_tokens(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        """See ``StepwiseDrafter``."""
        return self._drafter.score_known_tokens(contexts)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Do nothing: the next ``open`` reads committed tokens."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences."""
        self._drafter.free(ids)

    def _rows(self, ids: Sequence[str]) -> Tensor:
        """Return the log-probabilities ``[len(ids), V]``; the tokens that are not recorded share the rest."""
        size = self._member.recording.vocab_size
        rows = np.empty((len(ids), size))
        for row, id in zip(rows, ids, strict=True):
            token, chance, second, second_chance = self._member.choice(id, *self._paths[id])
            rest = (1.0 - chance - second_chance) / max(1, size - (1 if second is None else 2))
            row[:] = max(LEAST, rest if second is None else min(rest, second_chance))
            row[token] = chance
            if second is not None:
                row[second] = second_chance
        return torch.from_numpy(np.log(np.maximum(rows, LEAST)).astype(np.float32))
