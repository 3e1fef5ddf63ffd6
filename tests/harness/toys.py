"""Engines around toy models, and runs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from cospec.config import EngineConfig, SpeculativeConfig
from cospec.draws import Draws, derive
from cospec.engine.build import Text, connect
from cospec.engine.engine import Engine
from cospec.engine.verifier import Verifier
from cospec.models.pages import PagePool
from cospec.models.toy import EMPTY, ToyModel
from cospec.params import SamplingParams
from cospec.plugins import Drafter
from cospec.types import Budget, Commit, Context, Draft, Event, Request, Speculation
from harness.oracle import BranchingDraws, Law, Trace, branching_race
from harness.stepwise import StepTrace, enumerate_steps

DRAWING_MODULES = (
    "cospec.engine.judging.Draws",
    "cospec.drafters.model.Draws",
    "cospec.drafters.branching.Draws",
    "cospec.rounds.proposing.Draws",
    "cospec.drafters.combiners.reading.Draws",
    "cospec.drafters.routing.choice.Draws",
)


@contextmanager
def drawing(draws: Callable[[int, int], Any]) -> Iterator[None]:
    """Draw with something else than ``Draws``."""
    with ExitStack() as stack:
        for name in DRAWING_MODULES:
            stack.enter_context(patch(name, draws))
        stack.enter_context(patch("cospec.drafters.model.race", branching_race))
        stack.enter_context(patch("cospec.drafters.branching.race", branching_race))
        stack.enter_context(patch("cospec.engine.judging.race", branching_race))
        stack.enter_context(patch("cospec.rounds.proposing.race", branching_race))
        stack.enter_context(patch("cospec.drafters.combiners.reading.race", branching_race))
        yield


def toy_engine(target: ToyModel, drafter: Drafter | None, rule: str = "auto", k: int = 3, **config: Any) -> Engine:
    """An engine with a draft length of ``k``.

    Args:
        config: fields of ``EngineConfig``; ``max_nodes`` and ``widths`` are those of ``SpeculativeConfig``.
    """
    text = config.pop("text", Text())
    shape = {key: config.pop(key) for key in ("max_nodes", "widths") if key in config}
    speculative = SpeculativeConfig(num_speculative_tokens=k, rule=rule, **shape)
    return Engine(connect(target, drafter, speculative, EngineConfig(**config), text))


def verifier_of(engine: Engine) -> Verifier:
    """Of an engine with one model."""
    verifier = engine.round.crew.judge
    assert isinstance(verifier, Verifier)
    return verifier


def with_pool(model: ToyModel, num_pages: int, page_size: int = 4, prefix_caching: bool = True) -> ToyModel:
    """The model with a cache of another size."""
    model.pages = PagePool(num_pages, page_size, prefix_caching)
    model.cells = [[EMPTY] * page_size for _ in range(num_pages)]
    return model


def make_request(id: str, prompt: Sequence[int], params: SamplingParams, **more: Any) -> Request:
    """One request with the seed of its parameters, 0 where they have none."""
    return Request(id, tuple(prompt), params, params.seed or 0, parent=id, **more)


def run_all(engine: Engine, requests: Sequence[Request], check: bool = True) -> dict[str, list[Event]]:
    """Run to the end; events by request."""
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(100_000):
        if not engine.has_work:
            return events
        for event in engine.step():
            events[event.id].append(event)
        if check:
            engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


def tokens_of(events: Mapping[str, Sequence[Event]]) -> dict[str, tuple[int, ...]]:
    """The output of each request."""
    return {id: tuple(token for event in own for token in event.tokens) for id, own in events.items()}


def enumerated_law(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, length: int = 3, by_round: bool = True
) -> Law:
    """The exact joint law of the first ``length`` tokens that ``engine`` writes.

    Every path through the random choices is a request of its own, known by its seed. Up to 16 of them run at once and
    new ones arrive while others are in the middle, so the enumeration also goes through a busy engine.
    """
    traces: dict[int, Trace] = {}
    outputs: dict[str, tuple[int, ...]] = {}
    waiting: list[tuple[int, ...]] = [()]
    law: Law = {}

    def draws(seed: Any, base: int) -> BranchingDraws:
        own, *ahead = seed if isinstance(seed, tuple) else (seed,)
        return BranchingDraws(traces[own], (base, *ahead) if ahead else base, by_round)

    with drawing(draws), patch("cospec.rounds.desk.derive", _unmixed):
        while waiting or outputs:
            while waiting and len(outputs) < 16:
                seed = len(traces)
                traces[seed] = Trace(waiting.pop())
                outputs[str(seed)] = ()
                rule = engine.parts.resolver.rule
                chosen = Speculation(rule=rule if rule != "auto" else "block")
                engine.add(Request(str(seed), tuple(prompt), params, seed, parent=str(seed), speculation=chosen))
            for event in engine.step():
                outputs[event.id] += event.tokens
                if event.finish is not None or len(outputs[event.id]) >= length:
                    engine.abort([event.id])
                    output, trace = outputs.pop(event.id)[:length], traces[int(event.id)]
                    law[output] = law.get(output, 0.0) + trace.probability
                    waiting += trace.left
    return law


def _unmixed(seed: int, index: int) -> tuple[int, int]:
    """In place of a seed derived from both, so that who draws ahead is known."""
    return seed, index


def enumerated_law_among(
    build: Callable[[], Engine], company: Sequence[Request], request: Request, length: int = 3
) -> Law:
    """The same for one request that arrives after others, in an engine of its own for every path.

    Where room is scarce, whether a draft is made depends on the neighbours; these are the same on every path.
    """

    def run(trace: StepTrace) -> tuple[int, ...]:
        engine, output = build(), tuple[int, ...]()
        reach = 0  # the length that a draft made ahead continues

        def draws(seed: Any, base: int) -> Draws | BranchingDraws:
            own, *ahead = seed if isinstance(seed, tuple) else (seed,)
            nonlocal reach
            if own == request.seed:
                reach = base if ahead else reach
                branching = trace.ahead if ahead else trace.now
                return BranchingDraws(branching, (base, *ahead) if ahead else base)
            return Draws(derive(own, *ahead) if ahead else own, base)

        with drawing(draws), patch("cospec.rounds.desk.derive", _unmixed):
            for each in (*company, request):
                engine.add(each)
            while len(output) < length:
                trace.next_step()
                output += tuple(t for event in engine.step() if event.id == request.id for t in event.tokens)
                engine.check_integrity()
                if len(output) >= length or len(request.prompt) + len(output) < reach:
                    trace.forget_ahead()
        return output[:length]

    return enumerate_steps(run)


class ScriptedDrafter(Drafter):
    """Proposes the same tree every time, cut to the budget."""

    name, samples, reads_states, drafts_ahead, learns = "scripted", False, False, True, False

    def __init__(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        self._tokens = tuple(tokens)
        self._parents = tuple(parents) if parents is not None else tuple(range(-1, len(tokens) - 1))

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            n = min(len(self._tokens), budget.max_nodes)
            drafts.append(Draft(context.id, len(context.tokens), self._tokens[:n], self._parents[:n], (self.name,) * n))
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        pass

    def free(self, ids: Sequence[str]) -> None:
        pass


__all__ = [
    "ScriptedDrafter",
    "drawing",
    "enumerated_law",
    "enumerated_law_among",
    "make_request",
    "run_all",
    "tokens_of",
    "toy_engine",
    "with_pool",
]
