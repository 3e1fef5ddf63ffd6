"""First rung: the joint law on the toy model, every path through the rule's draws, no sampling.

The engine runs as always: scheduler, cache, packed forward, law, committer, sixteen sequences at once. Its rule is
handed draws that branch over every outcome in the place of the generator's, and the drafter draws through the same
branches. The token behind the prompt has no draft; it is drawn with one seed, and the law of the rest is given it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar

import numpy as np

from cospec.bench.verify.checks import Check
from cospec.bench.verify.controls import NoResidual
from cospec.bench.verify.oracle import BranchingDraws, Law, Trace, total_variation
from cospec.bench.verify.subject import Subject, bare_engine
from cospec.draws import Draws, Floats, Purpose
from cospec.engine.engine import Engine
from cospec.models.toy import ToyModel
from cospec.params import SamplingParams
from cospec.plugins import Drafter, Rule
from cospec.registry import RULES
from cospec.types import Budget, Commit, Context, Draft, Request, Scores, Speculation, Verdict

EXACT, SEEN = 1e-12, 1e-3
PROMPT, TEMPERATURE, DEPTH = (0, 1, 0), 0.8, 2
AT_ONCE = 16
Traces = dict[str, Trace]


def climb(subject: Subject) -> Iterator[Check]:
    """Each rule of the engine with drawn and with chosen drafts, then a wrong rule that must be seen."""
    length = subject.effort.length
    for name in subject.rules:
        for kind, error in errors(RULES.load(name)(), length).items():
            yield Check("enumeration", f"rule {name}, {kind}", f"TV {error:.1e}", f"< {EXACT:.0e}", error < EXACT)
    error = _error(NoResidual(), None, length)
    yield Check("enumeration", "control: no residual", f"TV {error:.1e}", f"> {SEEN:.0e}", error > SEEN)


def errors(rule: Rule, length: int) -> dict[str, float]:
    """Total variation between the engine's law under ``rule`` and the toy model's, by kind of draft."""
    drafters: dict[str, ChosenDrafter | None] = {"chosen drafts": ChosenDrafter((0, 1), (-1, 0))}
    if rule.noise is Purpose.DRAFT:
        drafters["drawn drafts"] = None
    elif rule.trees:
        drafters["chosen trees"] = ChosenDrafter((0, 1, 2, 1), (-1, -1, 0, 1))
    return {kind: _error(rule, drafter, length) for kind, drafter in drafters.items()}


def _error(rule: Rule, chosen: ChosenDrafter | None, length: int) -> float:
    traces: Traces = {}
    target: Any = ToyModel(3, order=2, seed=1)  # its pages are of a narrower type than the protocol's
    drafter = chosen or DrawnDrafter(traces)
    nodes = len(chosen.tokens) if chosen else DEPTH
    engine = bare_engine(target, drafter, nodes, {"block": _branching(rule, traces)})
    return total_variation(_enumerate(engine, traces, length), _wanted(target, length))


def _branching(rule: Rule, traces: Mapping[str, Trace]) -> Rule:
    """The rule with draws that branch."""

    class BranchingRule(Rule):
        name: ClassVar[str] = rule.name
        exact: ClassVar[bool] = rule.exact
        reads_law: ClassVar[bool] = rule.reads_law
        trees: ClassVar[bool] = rule.trees
        noise: ClassVar[Purpose] = rule.noise

        def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
            """What the rule decides on this path."""
            branching: Any = BranchingDraws(traces[draft.id], draft.base_len)
            return rule.judge(draft, scores, branching)

    return BranchingRule()


class DrawnDrafter(Drafter):
    """Draws chains from another toy model, through the branches."""

    samples = True
    reads_states = False
    drafts_ahead = False
    learns = False

    def __init__(self, traces: Mapping[str, Trace]) -> None:
        self.name, self._traces, self._model = "drawn", traces, ToyModel(3, order=1, seed=5, sharpness=1.5)

    def propose(self, contexts: Seq[Context], budgets: Seq[Budget]) -> list[Draft]:
        """One chain each."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            base = len(context.tokens)
            tokens: list[int] = []
            q: list[Floats] = []
            draws = BranchingDraws(self._traces[context.id], base)
            for place in range(base, base + budget.depth):
                weights = _softmax(self._model.logits([*context.tokens, *tokens]).tolist())
                q.append(np.array(weights, dtype=np.float64))
                tokens.append(draws.token(q[-1], place, Purpose.DRAFT))
            n = len(tokens)
            chain = tuple(range(-1, n - 1))
            drafts.append(Draft(context.id, base, tuple(tokens), chain, (self.name,) * n, np.stack(q)))
        return drafts

    def commit(self, commits: Seq[Commit]) -> None:
        """Nothing to learn."""

    def free(self, ids: Seq[str]) -> None:
        """Nothing to forget."""


class ChosenDrafter(Drafter):
    """Proposes the same tree every time."""

    samples = False
    reads_states = False
    drafts_ahead = False
    learns = False

    def __init__(self, tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
        self.name, self.tokens, self._parents = "chosen", tokens, parents

    def propose(self, contexts: Seq[Context], budgets: Seq[Budget]) -> list[Draft]:
        """As much of the tree as the budget takes."""
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            n = min(len(self.tokens), budget.max_nodes)
            base = len(context.tokens)
            drafts.append(Draft(context.id, base, self.tokens[:n], self._parents[:n], (self.name,) * n))
        return drafts

    def commit(self, commits: Seq[Commit]) -> None:
        """Nothing to learn."""

    def free(self, ids: Seq[str]) -> None:
        """Nothing to forget."""


def _enumerate(engine: Engine, traces: Traces, length: int) -> Law:
    """The law of the token behind the prompt, which is always the same, and the ``length`` tokens after it."""
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=length + 2 * DEPTH + 3)
    outputs: dict[str, tuple[int, ...]] = {}
    waiting: list[tuple[int, ...]] = [()]
    law: Law = {}
    while waiting or outputs:
        while waiting and len(outputs) < AT_ONCE:
            id = str(len(traces))
            traces[id], outputs[id] = Trace(waiting.pop()), ()
            engine.add(Request(id, PROMPT, params, 0, parent=id, speculation=Speculation(rule="block")))
        for event in engine.step():
            outputs[event.id] += event.tokens
            if len(outputs[event.id]) > length:
                engine.abort([event.id])
                output, trace = outputs.pop(event.id)[: length + 1], traces[event.id]
                law[output] = law.get(output, 0.0) + trace.probability
                waiting += trace.left
    return law


def _wanted(target: ToyModel, length: int) -> Law:
    """The same by the book, in plain Python."""
    weights = np.array(_softmax(target.logits(PROMPT).tolist()))
    first = Draws(0, len(PROMPT)).token(weights, len(PROMPT), Purpose.TARGET)
    law: Law = {(first,): 1.0}
    for _ in range(length):
        longer: Law = {}
        for output, mass in law.items():
            assert isinstance(output, tuple)
            shares = _softmax(target.logits([*PROMPT, *output]).tolist())
            longer |= {(*output, token): mass * share for token, share in enumerate(shares)}
        law = longer
    return law


def _softmax(logits: Seq[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp((value - top) / TEMPERATURE) for value in logits]
    return [weight / math.fsum(weights) for weight in weights]
