"""Engines around toy models, and runs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, Event, Request, SpeculationParams
from cospec.core.verifier import TargetVerifier
from cospec.models.block_manager import BlockPool
from cospec.models.toy import EMPTY, ToyModel
from cospec.rng.random_streams import RandomStreams, derive_seed
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import BranchingRandom, BranchTrace, OutputDistribution, branching_sample
from harness.stepwise import StepTrace, enumerate_steps

DRAWING_MODULES = (
    "cospec.acceptance.python_verification.RandomStreams",
    "cospec.drafters.model.RandomStreams",
    "cospec.drafters.dynamic_tree.RandomStreams",
    "cospec.ensemble.proposer.RandomStreams",
    "cospec.drafters.pool.candidates.RandomStreams",
    "cospec.drafters.pool.routing.routing.RandomStreams",
)


@contextmanager
def drawing(draws: Callable[[int, int], Any]) -> Iterator[None]:
    """Draw with something else than ``RandomStreams``."""
    with ExitStack() as stack:
        for name in DRAWING_MODULES:
            stack.enter_context(patch(name, draws))
        stack.enter_context(patch("cospec.drafters.model.exponential_sample", branching_sample))
        stack.enter_context(patch("cospec.drafters.dynamic_tree.exponential_sample", branching_sample))
        stack.enter_context(patch("cospec.acceptance.python_verification.exponential_sample", branching_sample))
        stack.enter_context(patch("cospec.ensemble.proposer.exponential_sample", branching_sample))
        stack.enter_context(patch("cospec.drafters.pool.candidates.exponential_sample", branching_sample))
        yield


def toy_engine(
    target: ToyModel, drafter: Drafter | None, acceptance_method: str = "auto", k: int = 3, **config: Any
) -> Engine:
    """An engine with a draft length of ``k``.

    Args:
        config: fields of ``EngineConfig``; ``max_nodes`` and ``widths`` are those of ``SpeculativeConfig``.
    """
    text = config.pop("text", TextInfo())
    shape = {key: config.pop(key) for key in ("max_nodes", "widths") if key in config}
    speculative = SpeculativeConfig(num_speculative_tokens=k, acceptance_method=acceptance_method, **shape)
    return Engine(assemble(target, drafter, speculative, EngineConfig(**config), text))


def verifier_of(engine: Engine) -> TargetVerifier:
    """Of an engine with one model."""
    verifier = engine.execution_mode.components.verifier
    assert isinstance(verifier, TargetVerifier)
    return verifier


def with_pool(model: ToyModel, num_pages: int, page_size: int = 4, prefix_caching: bool = True) -> ToyModel:
    """The model with a cache of another size."""
    model.pages = BlockPool(num_pages, page_size, prefix_caching)
    model.cells = [[EMPTY] * page_size for _ in range(num_pages)]
    return model


def make_request(id: str, prompt: Sequence[int], params: SamplingParams, **more: Any) -> Request:
    """One request with the seed of its parameters, 0 where they have none."""
    return Request(id, tuple(prompt), params, params.seed or 0, parent=id, **more)


def run_all(
    engine: Engine, requests: Sequence[Request], check: bool = True, before: Callable[[int], object] = lambda step: None
) -> dict[str, list[Event]]:
    """Run to the end; events by request. ``before`` gets the number of each step before the step."""
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for step in range(100_000):
        if not engine.has_work:
            return events
        before(step)
        for event in engine.step():
            events[event.id].append(event)
        if check:
            engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


def tokens_of(events: Mapping[str, Sequence[Event]]) -> dict[str, tuple[int, ...]]:
    """The output of each request."""
    return {id: tuple(token for event in own for token in event.tokens) for id, own in events.items()}


def enumerated_distribution(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    length: int = 3,
    by_round: bool = True,
    at_once: int = 16,
) -> OutputDistribution:
    """The exact joint distribution of the first ``length`` tokens of ``engine``.

    Every path through the random choices is a request of its own, known by its seed. Up to ``at_once`` run at once and
    new ones arrive while others are in the middle, so the enumeration also goes through a busy engine. ``at_once`` is 1
    where a request's random choices depend on whether others run.
    """
    return _enumerated(engine, Request("", tuple(prompt), params, 0), length, by_round, at_once)


def enumerated_distribution_after(
    engine: Engine, neighbour: Request, prompt: Sequence[int], params: SamplingParams, length: int = 3
) -> OutputDistribution:
    """The same for one request at a time that arrives after a greedy one, in an idle engine for every path."""

    def restart() -> None:
        engine.abort([neighbour.id])
        while engine.has_work:
            engine.step()
        engine.add(neighbour)

    return _enumerated(engine, Request("", tuple(prompt), params, 0), length, at_once=1, restart=restart)


def _enumerated(
    engine: Engine,
    request: Request,
    length: int,
    by_round: bool = True,
    at_once: int = 1,
    restart: Callable[[], None] = lambda: None,
) -> OutputDistribution:
    """Enumerate copies of ``request``, each with a seed of its own; ``restart`` is called where no copy runs."""
    traces: dict[int, BranchTrace] = {}
    outputs: dict[str, tuple[int, ...]] = {}
    waiting: list[tuple[int, ...]] = [()]
    distribution: OutputDistribution = {}
    method = engine.parts.input_processor.acceptance_method
    chosen = SpeculationParams(acceptance_method=method if method != "auto" else "block")

    def draws(seed: int, base: int) -> RandomStreams | BranchingRandom:
        own, ahead = _parts(seed)
        if own not in traces:
            return RandomStreams(derive_seed(own, *ahead) if ahead else own, base)
        return BranchingRandom(traces[own], (base, *ahead) if ahead else base, by_round)

    with drawing(draws), patch("cospec.execution.draft_dispatcher.derive_seed", unmixed):
        while waiting or outputs:
            if not outputs:
                restart()
            while waiting and len(outputs) < at_once:
                seed = len(traces)
                traces[seed] = BranchTrace(waiting.pop())
                outputs[str(seed)] = ()
                engine.add(replace(request, id=str(seed), seed=seed, parent=str(seed), speculation=chosen))
            for event in engine.step():
                if event.id not in outputs:  # of a neighbour
                    continue
                outputs[event.id] += event.tokens
                if event.finish is not None or len(outputs[event.id]) >= length:
                    engine.abort([event.id])
                    output, trace = outputs.pop(event.id)[:length], traces[int(event.id)]
                    distribution[output] = distribution.get(output, 0.0) + trace.probability
                    waiting += trace.left
    return distribution


_OWN_BITS = 24


def unmixed(seed: int, index: int) -> int:
    """In place of a seed derived from both: one whose parts ``_parts`` gives back."""
    return index << _OWN_BITS | seed


def _parts(seed: int) -> tuple[int, tuple[int, ...]]:
    """The seed of the request, and what a draft made ahead derived its own seed with."""
    own, ahead = seed & (1 << _OWN_BITS) - 1, seed >> _OWN_BITS
    return own, (ahead,) if ahead else ()


def enumerated_distribution_among(
    build: Callable[[], Engine], company: Sequence[Request], request: Request, length: int = 3
) -> OutputDistribution:
    """The same for one request that arrives after others, in an engine of its own for every path.

    Where room is scarce, whether a draft is made depends on the neighbours; these are the same on every path.
    """

    path: StepTrace
    reach = 0  # the length that a draft made ahead continues

    def draws(seed: int, base: int) -> RandomStreams | BranchingRandom:
        own, ahead = _parts(seed)
        nonlocal reach
        if own == request.seed:
            reach = base if ahead else reach
            branching = path.ahead if ahead else path.now
            return BranchingRandom(branching, (base, *ahead) if ahead else base)
        return RandomStreams(derive_seed(own, *ahead) if ahead else own, base)

    def run(trace: StepTrace) -> tuple[int, ...]:
        nonlocal path, reach
        path, reach = trace, 0
        engine, output = build(), tuple[int, ...]()
        for each in (*company, request):
            engine.add(each)
        while len(output) < length:
            trace.next_step()
            output += tuple(t for event in engine.step() if event.id == request.id for t in event.tokens)
            engine.check_integrity()
            if len(output) >= length or len(request.prompt) + len(output) < reach:
                trace.forget_ahead()
        return output[:length]

    with drawing(draws), patch("cospec.execution.draft_dispatcher.derive_seed", unmixed):
        return enumerate_steps(run)


class ScriptedDrafter(Drafter):
    """Proposes the same tree every time, cut to the budget."""

    name, samples, reads_hidden_states, drafts_ahead, learns = "scripted", False, False, True, False

    def __init__(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        self._tokens = tuple(tokens)
        self._parents = tuple(parents) if parents is not None else tuple(range(-1, len(tokens) - 1))

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
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
    "enumerated_distribution",
    "enumerated_distribution_after",
    "enumerated_distribution_among",
    "make_request",
    "run_all",
    "tokens_of",
    "toy_engine",
    "with_pool",
]
