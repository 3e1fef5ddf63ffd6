"""First check group: the joint distribution on the toy model over every random path, without sampling.

The engine runs as usual: scheduler, cache, packed forward, blend, output processor, sixteen sequences together. The
acceptance method gets draws that branch over every outcome, and the drafter draws through the same branches. The token
after the prompt has no draft. It is drawn with one seed, and the other tokens' distribution is conditional on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from cospec.core.engine import Engine
from cospec.core.plugin_base import AcceptanceMethod, Drafter
from cospec.core.types import (
    Commit,
    Draft,
    DraftBudget,
    DraftContext,
    Request,
    SpeculationParams,
    TargetProbs,
    VerifyResult,
)
from cospec.ensemble.blends.registry import build_blend
from cospec.ensemble.blends.weighted import Single
from cospec.models.toy import ToyModel
from cospec.registry import ACCEPTANCE_METHODS
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from cospec.verify.context import Check, CheckContext, RequestFailed, Target, bare_engine
from cospec.verify.controls import NoResidual
from cospec.verify.enumerated_draws import BranchingRandom, BranchTrace, OutputDistribution, total_variation

EXACT, SEEN = 1e-12, 1e-3
PROMPT, TEMPERATURE, DEPTH = (0, 1, 0), 0.8, 2
AT_ONCE = 16
BranchTraces = dict[str, BranchTrace]


def run_checks(context: CheckContext) -> Iterator[Check]:
    """Check each acceptance method with drawn and with fixed drafts, then a wrong method as control."""
    length, target = context.effort.length, toy_target(len(context.models), context.ensemble)
    for name in context.acceptance_methods:
        for kind, error in errors(ACCEPTANCE_METHODS.load(name)(), length, target).items():
            yield Check(
                "enumeration", f"acceptance method {name}, {kind}", f"TV {error:.1e}", f"< {EXACT:.0e}", error < EXACT
            )
    error = _error(NoResidual(), None, length, target)
    yield Check("enumeration", "control: no residual", f"TV {error:.1e}", f"> {SEEN:.0e}", error > SEEN)


def toy_target(count: int = 1, ensemble: Mapping[str, Any] | None = None, words: int = 3) -> Target:
    """Return toy models of ``words`` tokens that form one distribution as the user's models do."""
    models: Any = tuple(ToyModel(words, order=2, seed=1 + place) for place in range(count))
    return Target(models, ensemble)  # toy models' pages have another type


def errors(acceptance_method: AcceptanceMethod, length: int, target: Target | None = None) -> dict[str, float]:
    """Return the total variation between the engine's and the toy models' distributions, by kind of draft."""
    target = target or toy_target()
    drafters: dict[str, ChosenDrafter | None] = {"chosen drafts": ChosenDrafter((0, 1), (-1, 0))}
    if acceptance_method.stream_kind is StreamKind.DRAFT:
        drafters["drawn drafts"] = None
    if acceptance_method.trees:
        drafters["chosen trees"] = ChosenDrafter((0, 1, 2, 1), (-1, -1, 0, 1))
    return {kind: _error(acceptance_method, drafter, length, target) for kind, drafter in drafters.items()}


def _error(acceptance_method: AcceptanceMethod, chosen: ChosenDrafter | None, length: int, target: Target) -> float:
    traces: BranchTraces = {}
    drafter = chosen or DrawnDrafter(traces)
    nodes = len(chosen.tokens) if chosen else DEPTH
    engine = bare_engine(target, drafter, nodes, {"block": branching(acceptance_method, traces)})
    return total_variation(_enumerate(engine, traces, length), wanted(target, length))


def branching(
    acceptance_method: AcceptanceMethod,
    traces: Mapping[str, BranchTrace],
    random: type[BranchingRandom] = BranchingRandom,
) -> AcceptanceMethod:
    """Wrap the acceptance method with draws that branch, by request id."""

    class BranchingMethod(AcceptanceMethod):
        name: ClassVar[str] = acceptance_method.name
        exact: ClassVar[bool] = acceptance_method.exact
        needs_probs: ClassVar[bool] = acceptance_method.needs_probs
        trees: ClassVar[bool] = acceptance_method.trees
        stream_kind: ClassVar[StreamKind] = acceptance_method.stream_kind

        def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
            """Return the method's decision on this path."""
            branching: Any = random(traces[draft.id], draft.base_len)
            return acceptance_method.verify(draft, target, branching)

    return BranchingMethod()


class DrawnDrafter(Drafter):
    """Draws chains from another toy model, through the branches."""

    samples = True
    reads_hidden_states = False
    drafts_ahead = False
    learns = False

    def __init__(self, traces: Mapping[str, BranchTrace]) -> None:
        self.name, self._traces, self._model = "drawn", traces, ToyModel(3, order=1, seed=5, sharpness=1.5)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Draw one chain per context."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            base = len(context.tokens)
            tokens: list[int] = []
            q: list[Floats] = []
            draws = BranchingRandom(self._traces[context.id], base)
            for place in range(base, base + budget.depth):
                weights = _softmax(self._model.logits([*context.tokens, *tokens]).tolist())
                q.append(np.array(weights, dtype=np.float64))
                tokens.append(draws.token(q[-1], place, StreamKind.DRAFT))
            n = len(tokens)
            chain = tuple(range(-1, n - 1))
            drafts.append(Draft(context.id, base, tuple(tokens), chain, (self.name,) * n, np.stack(q)))
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        """Nothing to learn."""

    def free(self, ids: Sequence[str]) -> None:
        """Nothing to forget."""


class ChosenDrafter(Drafter):
    """Proposes the same tree in every step."""

    samples = False
    reads_hidden_states = False
    drafts_ahead = False
    learns = False

    def __init__(self, tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
        self.name, self.tokens, self._parents = "chosen", tokens, parents

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return as many nodes of the tree as the budget allows."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            n = min(len(self.tokens), budget.max_nodes)
            base = len(context.tokens)
            drafts.append(Draft(context.id, base, self.tokens[:n], self._parents[:n], (self.name,) * n))
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        """Nothing to learn."""

    def free(self, ids: Sequence[str]) -> None:
        """Nothing to forget."""


def _enumerate(engine: Engine, traces: BranchTraces, length: int) -> OutputDistribution:
    """Return the fixed token after the prompt, and the distribution of the ``length`` tokens after it.

    Raises:
        RequestFailed: a request ended with an error.
    """
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=length + 2 * DEPTH + 3)
    outputs: dict[str, tuple[int, ...]] = {}
    waiting: list[tuple[int, ...]] = [()]
    distribution: OutputDistribution = {}
    while waiting or outputs:
        while waiting and len(outputs) < AT_ONCE:
            id = str(len(traces))
            traces[id], outputs[id] = BranchTrace(waiting.pop()), ()
            engine.add(
                Request(id, PROMPT, params, 0, parent=id, speculation=SpeculationParams(acceptance_method="block"))
            )
        for event in engine.step():
            if event.error is not None:
                raise RequestFailed(f"a request of the enumeration ended with: {event.error}")
            outputs[event.id] += event.tokens
            if len(outputs[event.id]) > length:
                engine.abort([event.id])
                output, trace = outputs.pop(event.id)[: length + 1], traces[event.id]
                distribution[output] = distribution.get(output, 0.0) + trace.probability
                waiting += trace.left
    return distribution


def wanted(target: Target, length: int) -> OutputDistribution:
    """Return the same distribution by definition, in plain Python; a blend of several models computes single rows."""
    blend = Single() if target.ensemble is None else build_blend(target.ensemble, len(target.models))

    def logits(context: Sequence[int]) -> list[float]:
        rows: Any = target.models
        row: list[float] = blend.combine([rows[member].logits(context)[None] for member in blend.members])[0].tolist()
        return row

    weights = np.array(_softmax(logits(PROMPT)))
    first = RandomStreams(0, len(PROMPT)).token(weights, len(PROMPT), StreamKind.TARGET)
    distribution: OutputDistribution = {(first,): 1.0}
    for _ in range(length):
        longer: OutputDistribution = {}
        for output, mass in distribution.items():
            assert isinstance(output, tuple)
            shares = _softmax(logits([*PROMPT, *output]))
            longer |= {(*output, token): mass * share for token, share in enumerate(shares)}
        distribution = longer
    return distribution


def _softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp((value - top) / TEMPERATURE) for value in logits]
    return [weight / math.fsum(weights) for weight in weights]
