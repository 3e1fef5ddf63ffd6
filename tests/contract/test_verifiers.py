"""Every verifier answers each submission with one output per entry, and can be asked for several steps as declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from cospec.core.engine import Engine
from cospec.core.types import Request
from cospec.distributed.model import ShardedModel
from cospec.drafters.ngram import NgramDrafter
from cospec.models.toy import ToyModel
from cospec.plugin_options import parse
from cospec.sampling_params import SamplingParams
from cospec.simulation.run import World
from cospec.simulation.scenario import Scenario
from cospec.simulation.workload import FILLER, SimulatedRequest
from harness.ensembles import ensemble_engine, toys
from harness.in_flight import with_steps_in_flight
from harness.llamas import llama_engine
from harness.sharded_targets import Folders, sharded
from harness.toys import ScriptedDrafter, make_request, toy_engine

COUNT, LENGTH = 5, 6


def target() -> Engine:
    return toy_engine(ToyModel(4), ScriptedDrafter([0, 1, 2]))


def queued() -> Engine:
    return with_steps_in_flight(target(), 3)


def ensemble() -> Engine:
    return ensemble_engine(toys(2), {"method": "weighted"}, drafter=NgramDrafter(1, 3))


def simulated(stages: int = 1) -> Engine:
    given = {
        "target": {"cost": {"fixed": 0.01}, "stages": stages, "steps_in_flight": stages},
        "variants": [{"name": "v", "num_speculative_tokens": 2}],
    }
    scenario = parse(Scenario, given)
    replica = World(scenario, scenario.variants[0], Path()).replica()
    for n in range(COUNT):  # the drafter reads the correct tokens of requests
        prompt, output = (FILLER,) * 2, (FILLER,) * LENGTH
        replica.requests[f"r{n}"] = SimulatedRequest(n, scenario.domains[0], 0.0, prompt, output, [0.5] * LENGTH)
    return replica.engine


VERIFIERS: dict[str, Callable[[], Engine]] = {
    "target": target,
    "queued": queued,
    "ensemble": ensemble,
    "simulated": simulated,
    "simulated pipeline": lambda: simulated(3),
}
SHARDS = {"stages": (2, 1), "tensor ranks": (1, 2)}  # pipeline stages and tensor ranks, each in a process of its own
NAMES = [*VERIFIERS, *(pytest.param(name, marks=pytest.mark.cluster) for name in SHARDS)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ShardedModel]]:
    """Sharded targets, each started once."""
    with ExitStack() as started:
        folder = tmp_path_factory.mktemp("models")
        yield cache(lambda name: started.enter_context(sharded(Folders.write(folder), *SHARDS[name])))


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest, shards: Callable[[str], ShardedModel]) -> Engine:
    name: str = request.param
    return VERIFIERS[name]() if name in VERIFIERS else llama_engine(shards(name), ScriptedDrafter([0, 1, 2]))


def requests() -> Sequence[Request]:
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    return [make_request(f"r{n}", (0, 1) if n % 2 else (1, 0), params) for n in range(COUNT)]


def test_a_submission_has_one_output_per_entry(engine: Engine) -> None:
    verifier = engine.execution_mode.components.verifier
    for request in requests():
        engine.add(request)
    plans = []
    for _ in range(verifier.max_in_flight):
        plans.append(engine.scheduler.plan())
        engine.scheduler.start_step(plans[-1].entries)
    futures = [verifier.submit(plan.entries, {}) for plan in plans]
    for plan, future in zip(plans, futures, strict=True):
        outputs = future.result()
        assert future.done() and future.result() == outputs
        assert [output.entry for output in outputs] == list(plan.entries)
        assert all(output.result is not None and output.error is None for output in outputs)
        engine.scheduler.clear_in_flight(plan.entries)
    planned = [entry.sequence.id for plan in plans for entry in plan.entries]
    assert sorted(planned) == [request.id for request in requests()]
    verifier.commit([])
    verifier.free([*planned, "unknown"])
    assert engine.metrics().kv_cache_usage == 0


def test_an_engine_keeps_to_the_declared_number(engine: Engine) -> None:
    verifier = engine.execution_mode.components.verifier
    assert engine.scheduler.limits.max_in_flight == verifier.max_in_flight >= 1
    lengths: dict[str, int] = {}
    for request in requests():
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            lengths[event.id] = lengths.get(event.id, 0) + len(event.tokens)
        assert engine.metrics().steps_in_flight < verifier.max_in_flight
        engine.check_integrity()
    assert lengths == {request.id: LENGTH for request in requests()}
