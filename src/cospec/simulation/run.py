"""Runs: engines on virtual clocks with arriving requests.

The engine with the earliest clock steps next. A request is submitted when no engine's clock is before the request's
time. So every engine sees each request at the right time, for any number of replicas. An engine that an outage meets
ends its step first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Any

from cospec.assembly.components import AcceptanceMethods, Verification, connect
from cospec.assembly.drafting import Drafting, build_policy
from cospec.config import SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.plugin_base import Drafter, Policy
from cospec.core.scheduler import SchedulerLimits
from cospec.core.types import TARGET, Event, FinishReason, Request
from cospec.errors import InvalidInput, words
from cospec.models.block_manager import BlockPool
from cospec.plugin_options import parse
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels
from cospec.registry import EXECUTION_MODES
from cospec.runtime.request_replay import LiveRequest
from cospec.sampling_params import SamplingParams
from cospec.simulation.clock import Outages, SimulatedExecutor, VirtualClock
from cospec.simulation.drafter_builder import TimedPart, build_drafter
from cospec.simulation.recorded_drafts import read_recording
from cospec.simulation.reference_policies import LONGEST, Oracle, Random, RecordedPolicy
from cospec.simulation.results import RequestLog, StepLog, summary
from cospec.simulation.scenario import DrafterConfig, Scenario, ScenarioVariant, TargetConfig
from cospec.simulation.simulated_drafter import DrafterSetting, Rates, SimulatedDrafter
from cospec.simulation.simulated_ensemble import build_ensemble
from cospec.simulation.simulated_models import SimulatedModel, SimulatedVerifier
from cospec.simulation.workload import SimulatedRequest, simulated_requests

PAGE = 16


@dataclass(slots=True)
class Replica:
    """One engine and its clock."""

    engine: Engine
    clock: VirtualClock
    requests: dict[str, SimulatedRequest]
    workers: Sequence[TimedPart]  # of drafts
    targets: Sequence[TimedPart]
    steps: StepLog
    outages: Outages  # of the engine
    met: int = 0  # outages after which the engine began without requests
    stalled: int = 0  # steps in a row that changed nothing
    live: dict[str, LiveRequest] = field(default_factory=dict)
    request_seconds: float = 0.0  # the integral of ``held`` over time

    @property
    def held(self) -> int:
        """Requests that have not ended."""
        return len(self.live)

    @property
    def lost(self) -> bool:
        """Whether an outage of the engine has begun, whose requests are to go on elsewhere."""
        return self.outages.begun(self.clock.now) > self.met

    def add(self, request: SimulatedRequest, moment: float) -> None:
        """Add a request at ``moment``."""
        id = str(request.number)
        params = SamplingParams(temperature=0.0, max_tokens=len(request.output), ignore_eos=True)
        made = Request(id, request.prompt, params, request.number, moment, id)
        self.take(request, LiveRequest(made, asyncio.Queue()), moment)

    def take(self, request: SimulatedRequest, live: LiveRequest, moment: float) -> None:
        """Add a request at ``moment``, after the tokens that another engine has written."""
        if not self.held:
            self.clock.reach(self.outages.end(max(self.clock.now, moment)))
            self.met = self.outages.begun(self.clock.now)
        self.request_seconds += self.clock.now - moment
        id = live.request.id  # an engine may still know the request from an earlier attempt
        id = f"{id}+{live.losses}" if live.losses else id
        self.requests[id], self.live[id] = request, live
        self.engine.add(replace(live.resumed(), id=id))

    def lose(self) -> list[tuple[SimulatedRequest, LiveRequest]]:
        """End all requests at the begin of an outage; they are to go on elsewhere."""
        self.engine.abort(list(self.live))
        while self.engine.metrics().steps_in_flight:
            self.engine.step()
        found = [(self.requests[id], live) for id, live in self.live.items()]
        self.live.clear()
        for _, live in found:
            live.survives()
        return found

    def step(self) -> Iterator[tuple[SimulatedRequest, Event]]:
        """Run one step; yield the requests that ended, with their last events."""
        began, held, steps = self.clock.now, self.held, len(self.steps.times)
        events = self.engine.step()
        self.request_seconds += held * (self.clock.now - began)
        for event in events:
            live = self.live[event.id]
            live.deliver(event, self.clock.now)
            whole = live.events.get_nowait()
            assert isinstance(whole, Event), "the engine goes on"
            if whole.finish is not None:
                del self.live[event.id]
                yield self.requests.pop(event.id), whole
        moved = self.clock.now > began or self.held != held or len(self.steps.times) > steps
        self.stalled = 0 if moved else self.stalled + 1
        # A step may find its stages lost at once. The next step waits for their return.
        assert self.stalled < 2, "the clock has not advanced"


@dataclass(frozen=True, slots=True)
class World:
    """The configuration of a variant's replicas."""

    scenario: Scenario
    variant: ScenarioVariant
    folder: Path

    @property
    def drafting(self) -> DrafterConfig:
        """The variant's drafter, or the scenario's."""
        return self.variant.drafting or self.scenario.drafting

    @property
    def target(self) -> TargetConfig:
        """The scenario's target, with the variant's steps in flight."""
        given, steps = self.scenario.target, self.variant.steps_in_flight
        return given if steps is None else given.model_copy(update={"steps_in_flight": steps})

    @property
    def cost_per_hour(self) -> float:
        """The price of all machines: replicas, each with drafter nodes of its own."""
        drafting = self.drafting if self.variant.policy != "off" else DrafterConfig()
        target = self.scenario.target
        return target.replicas * (target.cost_per_hour + drafting.machines * drafting.cost_per_hour)

    def outages(self, part: str, replica: int) -> Outages:
        """The outages of one engine, or of its stages."""
        found = [each.span for each in self.variant.outages if (each.part, each.replica) == (part, replica)]
        return Outages(found)

    def replica(self, number: int = 0) -> Replica:
        """Build an engine at time 0.

        Raises:
            InvalidInput: a policy, option or execution mode does not exist.
        """
        scenario, variant = self.scenario, self.variant
        clock = VirtualClock([(each.seconds, each.factor) for each in scenario.pace])
        target, draft = scenario.target.cost.built(self.folder), self.drafting.cost.built(self.folder)
        if target.seconds(1, 1, 1) <= 0:
            raise InvalidInput("target.cost", words("nothing"), "seconds for a token")
        recording = None if scenario.recording is None else read_recording(self.folder / scenario.recording)
        requests: dict[str, SimulatedRequest] = {}
        setting = DrafterSetting(clock, requests, self._rates(), self.folder, recording)
        drafter, workers = build_drafter(self.drafting, setting)
        verification, drafting, targets = self._target(setting, target, self.outages("stage", number))
        if drafting is None:
            policy = self._policy(drafter, setting, target, draft)
            executor = SimulatedExecutor(drafter, clock, self.drafting.nodes)
            order = EXECUTION_MODES.load(variant.execution_mode)
            drafting = Drafting(order, policy, drafter, executor, why_no_multi_step="simulated models")
        steps = StepLog(clock)
        drafting = replace(drafting, policy=RecordedPolicy(drafting.policy, steps))
        limits = SchedulerLimits(
            variant.max_num_seqs or scenario.max_num_seqs,
            scenario.max_num_batched_tokens,
            verification.pages.capacity,
            max_in_flight=verification.verifier.max_in_flight,
        )
        parts = connect(verification, drafting, SpeculativeConfig(acceptance_method="match"), limits, clock)
        return Replica(Engine(parts), clock, requests, workers, targets, steps, self.outages("replica", number))

    def _target(
        self, setting: DrafterSetting, cost: ForwardLatency, outages: Outages
    ) -> tuple[Verification, Drafting | None, Sequence[TimedPart]]:
        """Return what verifies, the drafting of an ensemble's members, and the parts that take time."""
        target = self.target
        if target.members:
            return build_ensemble(target, self.variant.collaboration, setting, self._pages)
        cache = SimulatedModel(self._pages(), setting.vocab_size)
        verifier = SimulatedVerifier(cache, target, cost, setting.clock, setting.requests, outages)
        capacity = cache.pages.capacity
        verification = Verification(cache, verifier, cache.pages, capacity, TARGET, AcceptanceMethods())
        return verification, None, [verifier]

    def _pages(self) -> BlockPool:
        return BlockPool(self.scenario.kv_tokens // PAGE, PAGE, prefix_caching=False)

    def _rates(self) -> dict[str, Rates]:
        """α by domain; 0.5 separates the correct tokens of a trace, whose difficulty is 0 or 1."""
        own = {each.name: 0.5 if each.trace else each.acceptance for each in self.scenario.domains}
        return {**own, **self.variant.acceptance}

    def _policy(
        self, drafter: Drafter, setting: DrafterSetting, target: ForwardLatency, draft: ForwardLatency
    ) -> Policy:
        variant = self.variant
        longest = variant.num_speculative_tokens if isinstance(variant.num_speculative_tokens, int) else LONGEST
        if variant.policy == "oracle":
            if self.drafting.kind == "recorded" or self.scenario.target.members:
                raise InvalidInput("policy", "oracle", "another policy for recorded drafters and for ensembles")
            known = SimulatedDrafter(self.drafting, draft, setting)
            return Oracle(known, target, draft, longest)
        if variant.policy == "random":
            return Random(longest, self.scenario.seed)
        given = {name: getattr(variant, name) for name in ("policy", "num_speculative_tokens", "widths", "max_nodes")}
        given |= {"policy_options": variant.policy_options, "execution_mode": variant.execution_mode}
        chosen = variant.policy in ("auto", "goodput") and variant.num_speculative_tokens == "auto"
        if setting.recording is not None and chosen:  # a limit that grows would ask for more than was recorded
            given |= {"policy": "goodput", "num_speculative_tokens": setting.recording.depth}
        config = parse(SpeculativeConfig, {"method": "simulated", **given}, "variants.")
        in_sequence = max(1, len(self.drafting.members)) if self.drafting.parallel is None else 1
        times = None if self.scenario.target.members else target  # an engine of several models learns their times
        return build_policy(config, drafter, setting.clock, LatencyModels(times, draft.scaled(in_sequence)))


def simulate(scenario: Scenario, folder: Path = Path()) -> dict[str, Any]:
    """Run all variants at all loads: ``{"scenario", "runs": [{"variant", "load", ...}]}``; see ``results.summary``."""
    scenario.check()
    coming = scenario.arrivals
    loads = coming.concurrency if coming.kind == "closed" else coming.rates
    runs = [
        {"variant": variant.name, "load": load, **run(World(scenario, variant, folder), float(load))}
        for variant in scenario.variants
        for load in loads
    ]
    return {"scenario": scenario.model_dump(mode="json", exclude_defaults=True), "runs": runs}


def run(world: World, load: float) -> dict[str, Any]:
    """Run one variant at one load; return ``results.summary``.

    A variant with outages also has ``replayed``, requests that went on on another engine or after an outage,
    ``verifier_losses``, and ``failed`` requests.
    """
    found, replicas = serve_all(world, load)
    busy = sum(_busy(each.targets) for each in replicas), sum(_busy(each.workers) for each in replicas)
    figures = summary(found, [each.steps for each in replicas], busy, world.drafting.machines, world.cost_per_hour)
    if world.variant.outages:
        losses = sum(each.engine.metrics().verifier_losses for each in replicas)
        figures |= {"replayed": found.replayed, "verifier_losses": losses, "failed": found.failed}
    return figures


def serve_all(world: World, load: float) -> tuple[RequestLog, list[Replica]]:
    """Run one variant at one load until all requests end."""
    replicas = [world.replica(number) for number in range(world.scenario.target.replicas)]
    coming, found, last = simulated_requests(world.scenario, load, world.folder), RequestLog(), 0.0
    closed = world.scenario.arrivals.kind == "closed"  # a request follows the end of another one
    arrivals = [(each.due or 0.0, each.number, each) for each in islice(coming, int(load) if closed else 1)]
    while arrivals or any(replica.held for replica in replicas):
        earliest = min((each for each in replicas if each.held), key=lambda each: each.clock.now, default=None)
        if arrivals and (earliest is None or arrivals[0][0] <= earliest.clock.now):
            moment, _, request = heappop(arrivals)
            _least_busy(replicas, moment).add(request, moment)
            for following in islice(coming, 0 if closed else 1):
                heappush(arrivals, (following.due or 0.0, following.number, following))
            continue
        assert earliest is not None, "an engine has work while requests are left"
        if earliest.lost:
            moment = earliest.clock.now
            for request, live in earliest.lose():
                _least_busy(replicas, moment).take(request, live, moment)
                found.replayed += 1
            continue
        for request, event in earliest.step():
            if event.finish is FinishReason.ERROR:
                found.failed += 1
            else:
                assert event.stats is not None, "the last event of a request has its statistics"
                found.add(event.stats, len(request.output))
            for following in islice(coming, 1 if closed else 0):
                heappush(arrivals, (earliest.clock.now, following.number, following))
        last = max(last, earliest.clock.now)
    found.end, found.request_seconds = last, sum(each.request_seconds for each in replicas)
    return found, replicas


def _least_busy(replicas: Sequence[Replica], moment: float) -> Replica:
    """Return the engine with the fewest requests, of those that are there first from ``moment`` on."""
    return min(replicas, key=lambda each: (each.outages.end(moment), each.held))


def _busy(parts: Sequence[TimedPart]) -> float:
    """Return the seconds that parts worked, in parallel or in turn."""
    return sum(part.busy for part in parts)
