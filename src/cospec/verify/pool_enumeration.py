"""The joint distribution under the user's pool: combiner and routing as configured, toy models as drafters and target.

A pool learns from what was committed, so each random path has an engine of its own. Numbers of the acceptance method
that a routing reads too are the same for both, and branch. A routing's own numbers are fixed, because the distribution
must hold for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cospec.config import SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import DraftContext, Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.drafters.pool.candidates import draw
from cospec.drafters.pool.lockstep_session import Draw
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.options import PoolOptions
from cospec.drafters.pool.pool import PoolContext, PoolDrafter
from cospec.drafters.pool.routing.drafter_weights import DrafterWeights
from cospec.drafters.pool.routing.routing import Feedback, Routing, RoutingInput
from cospec.models.toy import ToyModel
from cospec.plugin_options import parse
from cospec.registry import ACCEPTANCE_METHODS, COMBINERS, DRAFTERS, ROUTINGS
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from cospec.verify.context import Check, CheckContext, RequestFailed, Target, bare_engine
from cospec.verify.enumerated_draws import (
    BranchingRandom,
    BranchTrace,
    OutputDistribution,
    SharedRandom,
    Unsound,
    enumerate_runs,
    total_variation,
)
from cospec.verify.enumeration import DEPTH, EXACT, PROMPT, TEMPERATURE, branching, toy_target, wanted

WORDS = 2  # of the toy models, because each path builds an engine
NODES = 4  # of trees
LENGTH = 3  # most tokens of an output


def run_checks(context: CheckContext) -> Iterator[Check]:
    """Check the configured pool with each acceptance method; nothing for another drafter."""
    speculative = context.llm.engine.config.speculative_config
    options = None if speculative is None else pool_options(speculative)
    if options is None:
        return
    target, length = toy_target(len(context.models), context.ensemble, WORDS), min(LENGTH, context.effort.length)
    for name in context.acceptance_methods:
        found = error(options, name, target, length)
        about = (
            f"acceptance method {name}, {options.combiner} and {options.routing} over {len(options.drafters)} drafters"
        )
        yield Check("enumeration", about, f"TV {found:.1e}", f"< {EXACT:.0e}", found < EXACT)


def pool_options(speculative: SpeculativeConfig) -> PoolOptions | None:
    """Return the options of a configured pool; None for another drafter."""
    if not speculative.drafts or not DRAFTERS.load(speculative.method).is_pool:
        return None
    options: PoolOptions = parse(PoolOptions, speculative.options, "speculative_config.")
    return options


def error(options: PoolOptions, name: str, target: Target, length: int) -> float:
    """Return the total variation between the distributions of an engine with the pool and of the toy models."""
    method = ACCEPTANCE_METHODS.load(name)()
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=length + 2 * DEPTH + 3)
    request = Request("0", PROMPT, params, 0, parent="0", speculation=SpeculationParams(acceptance_method=name))

    def outcome(trace: BranchTrace) -> tuple[int, ...]:
        engine = _engine(options, method, target, trace)
        engine.add(request)
        output: tuple[int, ...] = ()
        while len(output) <= length:
            for event in engine.step():
                if event.error is not None:
                    raise RequestFailed(f"a request of the enumeration ended with: {event.error}")
                output += event.tokens
        engine.abort([request.id])  # the engines share the target's KV cache
        return output[: length + 1]

    found: OutputDistribution = enumerate_runs(outcome)
    return total_variation(found, wanted(target, length))


def _engine(options: PoolOptions, method: AcceptanceMethod, target: Target, trace: BranchTrace) -> Engine:
    combiner, routing = COMBINERS.load(options.combiner)(), ROUTINGS.load(options.routing)
    chosen = routing.build(parse(routing.Options, options.routing_options, "speculative_config.routing_options."))
    similarity = _similarity if chosen.compares else None
    setting = PoolContext(
        target.vocab_size, lambda: 0.0, options.at_most, similarity=similarity, draw=_branching_draw(trace)
    )
    drafters = [ModelDrafter(_drafter(place)) for place in range(len(options.drafters))]
    members = [
        Member.of(f"drafter {place}", drafter, setting.clock, combiner.is_stepwise)
        for place, drafter in enumerate(drafters)
    ]
    pool = PoolDrafter(members, combiner, _branching_routing(chosen, trace), setting)
    return bare_engine(target, pool, DEPTH, {method.name: branching(method, {"0": trace}, SharedRandom)}, NODES)


def _similarity(first: int, second: int) -> float:
    """How similar two words of the toy models are, for a routing that compares."""
    return 1.0 if first == second else 0.3


def _drafter(place: int) -> ToyModel:
    return ToyModel(WORDS, order=1 + place % 2, seed=5 + 2 * place, sharpness=1.5 - 0.5 * (place % 2))


class HiddenSeed(int):
    """A seed that makes no random numbers, because these would not branch."""

    def __mod__(self, other: int) -> int:
        raise Unsound("a routing made random numbers from the seed; RoutingInput.draws has them")


@dataclass(frozen=True)
class RoutingDraws:
    """The random numbers of a routing in one step.

    Attributes:
        own: those of its own kind.
        shared: the others.
    """

    own: RandomStreams
    shared: SharedRandom

    def uniforms(self, position: int, count: int, kind: StreamKind, branch: int = 0) -> Any:
        return self._of(kind).uniforms(position, count, kind, branch)

    def token(self, weights: Floats, position: int, kind: StreamKind, branch: int = 0) -> int:
        return self._of(kind).token(weights, position, kind, branch)

    def stream(self, position: int, kind: StreamKind, branch: int = 0) -> Any:
        return self._of(kind).stream(position, kind, branch)

    def _of(self, kind: StreamKind) -> RandomStreams | SharedRandom:
        return self.own if kind is StreamKind.ROUTE else self.shared


def _branching_routing(routing: Routing, trace: BranchTrace) -> Routing:
    """Wrap the routing with these random numbers."""

    def streams(seed: int, base: int) -> Any:
        return RoutingDraws(RandomStreams(int(seed), base), SharedRandom(trace, base))

    class BranchingRouting(Routing):
        name: ClassVar[str] = routing.name
        scores_known_tokens: ClassVar[bool] = routing.scores_known_tokens
        learns: ClassVar[bool] = routing.learns
        weighs: ClassVar[bool] = routing.weighs
        compares = routing.compares

        def route(self, weights: DrafterWeights, choice: RoutingInput) -> list[int]:
            """Return the routing's choice on this path."""
            return routing.route(weights, choice._replace(seed=HiddenSeed(choice.seed), streams=streams))

        def learn(self, weights: DrafterWeights, parts: Mapping[int, Feedback]) -> None:
            """Let the routing learn."""
            routing.learn(weights, parts)

    return BranchingRouting()


def _branching_draw(trace: BranchTrace) -> Draw:
    """Return draws for a combiner that branch, where the acceptance method uses the drafts' distribution.

    Other methods keep the distribution for every draft, so there one draft a path is enough.
    """

    def drawn(weights: Floats, contexts: Sequence[DraftContext], ahead: Sequence[int]) -> list[int]:
        found = []
        for row, context, places in zip(weights, contexts, ahead, strict=True):
            base = len(context.tokens)
            if context.stream_kind is StreamKind.DRAFT:
                found.append(BranchingRandom(trace, base).token(row, base + places, StreamKind.DRAFT))
            else:
                found += draw(row[None], [context], [places])
        return found

    return drawn
