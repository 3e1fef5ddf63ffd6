"""A simulated pool of recorded drafters takes the steps of the engine with the same drafters on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from cospec.bench.record import record
from cospec.bench.step_recorder import recorded
from cospec.core.engine import Engine
from cospec.core.types import Request
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.pool.pool import PoolDrafter
from cospec.errors import InvalidInput
from cospec.models.toy import ToyModel
from cospec.plugin_options import parse
from cospec.registry import COMBINERS, ROUTINGS
from cospec.sampling_params import SamplingParams
from cospec.simulation.recorded_drafts import Recording, read_recording
from cospec.simulation.run import World, serve_all, simulate
from cospec.simulation.scenario import Scenario, TargetOutageConfig
from cospec.simulation.workload import simulated_requests
from harness.pools import pool_engine, pool_of
from harness.toys import run_all, tokens_of, toy_engine, with_pool

VOCAB, LENGTH, DEPTH, NODES = 6, 24, 3, 6
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
PROMPTS = [[n, 1, 2, n, 4, n][: n + 2] for n in range(5)]
NAMES = ("first", "second", "near", "ngram")
WIDE: dict[str, Any] = {"widths": (2, 2, 1), "max_nodes": 64}  # no node is cut
COST = {"fixed": 0.5, "slopes": [0.01]}
Steps = list[tuple[int, int, int, int, int]]


def target() -> ToyModel:
    return with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), 64, prefix_caching=False)


def drafters() -> dict[str, ToyModel]:
    return {
        "first": ToyModel(VOCAB, order=1, seed=5, sharpness=1.5),
        "second": ToyModel(VOCAB, order=2, seed=7, sharpness=1.0),
        "near": ToyModel(VOCAB, order=2, seed=1, sharpness=1.0),
    }


def requests() -> list[Request]:
    return [Request(str(n), tuple(prompt), GREEDY, n, parent=str(n)) for n, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def recording() -> Recording:
    outputs = tokens_of(run_all(toy_engine(target(), None), requests()))
    domains = ["even" if n % 2 == 0 else "odd" for n in range(len(PROMPTS))]
    written = [
        (domain, prompt, outputs[str(n)]) for n, (domain, prompt) in enumerate(zip(domains, PROMPTS, strict=True))
    ]
    return record(drafters(), written, VOCAB, DEPTH)


def engine_steps(combiner: str, routing: str, names: Sequence[str] = NAMES, **shape: Any) -> Steps:
    """Sequences, tokens computed, proposed, accepted and committed tokens of every step."""
    models, shape = drafters(), shape or {"max_nodes": NODES}
    members = {name: ModelDrafter(models[name]) if name in models else NgramDrafter() for name in names}
    engine = pool_engine(
        target(),
        pool_of(members, combiner, routing, VOCAB),
        k=DEPTH,
        max_num_seqs=3,
        max_num_batched_tokens=96,
        **shape,
    )
    parts, recorder = recorded(engine.parts)
    run_all(Engine(parts, engine.config), requests())
    return [(s.sequences, s.batched_tokens, s.proposed, s.accepted, s.committed) for s in recorder.steps]


def scenario(combiner: str, routing: str = "hedge", members: Sequence[Any] = (), **more: Any) -> Scenario:
    named = members or [{"name": name} for name in NAMES]
    shape = {"num_speculative_tokens": DEPTH, "max_nodes": NODES, "policy": "fixed"}
    drafting = {"kind": "recorded", "cost": COST, "members": named, "combiner": combiner, "routing": routing, **more}
    return parse(
        Scenario,
        {
            "requests": len(PROMPTS), "max_num_seqs": 3, "max_num_batched_tokens": 96, "recording": "toy.npz",
            "target": {"cost": {"fixed": 1.0}}, "drafting": drafting,
            "arrivals": {"kind": "closed", "concurrency": [len(PROMPTS)]}, "variants": [{"name": "pool", **shape}],
        },
    )  # fmt: skip


def simulated_steps(recording: Recording, folder: Path, made: Scenario) -> Steps:
    read_recording.cache_clear()
    recording.save(folder / "toy.npz")
    _, (replica,) = serve_all(World(made, made.variants[0], folder), float(len(PROMPTS)))
    replica.engine.check_integrity()
    return replica.steps.rows


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("combiner", COMBINERS)
def test_steps_are_those_of_the_engine(recording: Recording, tmp_path: Path, combiner: str, routing: str) -> None:
    wanted = engine_steps(combiner, routing)
    found = simulated_steps(recording, tmp_path, scenario(combiner, routing))
    assert sum(row[3] for row in wanted) > 30, "the drafters are right at times"
    assert found == wanted


def trees(recording: Recording, folder: Path, names: Sequence[str], combiner: str | None, **more: Any) -> Steps:
    """The simulated steps of trees of ``WIDE``."""
    made = scenario(combiner or "vote", "all", [{"name": name} for name in names], **more)
    drafting = made.drafting.model_copy(update={"combiner": combiner})
    tree = made.variants[0].model_copy(update=WIDE)
    return simulated_steps(recording, folder, made.model_copy(update={"variants": (tree,), "drafting": drafting}))


@pytest.mark.parametrize("name", ["first", "second"])
def test_trees_of_one_drafter_take_the_steps_of_the_engine(recording: Recording, tmp_path: Path, name: str) -> None:
    engine = pool_engine(
        target(), ModelDrafter(drafters()[name]), k=DEPTH, max_num_seqs=3, max_num_batched_tokens=96, **WIDE
    )
    parts, recorder = recorded(engine.parts)
    run_all(Engine(parts, engine.config), requests())
    wanted = [(s.sequences, s.batched_tokens, s.proposed, s.accepted, s.committed) for s in recorder.steps]
    assert trees(recording, tmp_path, [name], None) == wanted
    other = replace(recording, second=np.roll(recording.second, 1, axis=1))
    assert trees(other, tmp_path, [name], None) != wanted, "the control: second choices of other positions"


def test_trees_of_a_pool_accept_about_as_many_tokens_as_in_the_engine(recording: Recording, tmp_path: Path) -> None:
    """A pool cuts the joined tree to its budget, by confidences which are assumed for nodes that are never accepted."""
    names = ["first", "near"]
    wanted = sum(row[3] for row in engine_steps("union", "all", names, **WIDE))
    for combiner, parallel in (("union", None), ("fuse", "process")):  # both join whole trees
        found = sum(row[3] for row in trees(recording, tmp_path, names, combiner, parallel=parallel))
        assert abs(found / wanted - 1) < 0.1, combiner


@pytest.mark.parametrize("execution_mode", ["sequential", "draft-for-outcomes"])
@pytest.mark.parametrize("combiner", ["union", "fuse"])
def test_goodput_sizes_the_trees_of_pools(
    recording: Recording, tmp_path: Path, combiner: str, execution_mode: str
) -> None:
    """Cheap drafts give trees; verification whose time grows with its tokens gives none."""
    variant = {"policy": "goodput", "num_speculative_tokens": "auto", "max_nodes": None}
    made = scenario(combiner, "all", parallel="node")
    mode = made.variants[0].model_copy(update={**variant, "execution_mode": execution_mode})

    def proposed(slope: float) -> int:
        cost = made.target.cost.model_copy(update={"slopes": (slope,)})
        given = made.model_copy(
            update={"variants": (mode,), "target": made.target.model_copy(update={"cost": cost}), "requests": 5}
        )
        return sum(row[2] for row in simulated_steps(recording, tmp_path, given))

    free, dear = proposed(0.0), proposed(1.0)
    assert free > 4 * dear


def test_other_drafts_take_other_steps(recording: Recording, tmp_path: Path) -> None:
    """The control: chains of another drafter, or of the position before, are noticed."""
    for changed in (recording.tokens[::-1], np.roll(recording.tokens, 1, axis=1)):
        other = replace(recording, tokens=changed)
        for combiner in ("vote", "union"):
            found = simulated_steps(other, tmp_path, scenario(combiner, "all"))
            assert found != engine_steps(combiner, "all"), combiner


def test_a_file_keeps_the_recording(recording: Recording, tmp_path: Path) -> None:
    recording.save(tmp_path / "r.npz")
    found = read_recording(tmp_path / "r.npz")
    assert (found.names, found.requests, found.vocab_size) == (recording.names, recording.requests, VOCAB)
    assert np.array_equal(found.tokens, recording.tokens) and np.array_equal(found.second, recording.second)
    assert np.abs(found.confidence - recording.confidence).max() < 1e-3
    with np.load(tmp_path / "r.npz") as arrays:
        np.savez_compressed(tmp_path / "later.npz", **{**arrays, "version": np.array(2)})
    with pytest.raises(InvalidInput, match="version 2"):
        read_recording(tmp_path / "later.npz")


def test_parallel_members_draft_at_the_same_time(recording: Recording, tmp_path: Path) -> None:
    """One request: each step drafts as long as the slowest member, and a link adds its delay there and back."""
    members: list[dict[str, Any]] = [{"name": "first"}, {"name": "near", "cost": {"fixed": 0.7}}]
    recording.save(tmp_path / "toy.npz")

    def seconds(parallel: str | None, link: float = 0.0) -> tuple[float, int]:
        linked = [{**each, "link": link} for each in members]
        made = scenario("vote", "all", linked, parallel=parallel).model_copy(update={"requests": 1})
        (found,) = simulate(made, tmp_path)["runs"]
        return found["seconds"], found["rounds"]

    (one_by_one, rounds), (together, same), (apart, again) = seconds(None), seconds("node"), seconds("node", 0.25)
    assert rounds == same == again and together < one_by_one
    drafted = round((apart - together) / 0.5)
    assert apart - together == pytest.approx(0.5 * drafted, abs=1e-5) and rounds - 2 <= drafted < rounds


def test_members_apart_score_the_prompt(recording: Recording, tmp_path: Path) -> None:
    """Scores of processes arrive a step later, and cost no step of the target."""
    recording.save(tmp_path / "toy.npz")
    members = [{"name": name} for name in drafters()]
    made = scenario("vote", "hedge", members, parallel="process", at_most=1)
    replica = World(made, made.variants[0], tmp_path).replica()
    for request in simulated_requests(made, float(len(PROMPTS)), tmp_path):
        replica.add(request, 0.0)
    pool = replica.engine.execution_mode.components.drafter
    assert isinstance(pool, PoolDrafter)
    looked = list[list[float]]()
    while replica.held:
        list(replica.step())
        looked.append([max([0.0, *(record.weights.looked[n] for record in pool.records.values())]) for n in range(3)])
    assert max(map(min, looked)) > 0, "every member has scored"
    assert max(pool.weights().values()) == pool.weights()["near"], "the best drafter is known"


@pytest.mark.parametrize("execution_mode", ["sequential", "pipelined", "draft-ahead", "draft-for-outcomes"])
def test_a_failed_member_costs_drafts_only(recording: Recording, tmp_path: Path, execution_mode: str) -> None:
    recording.save(tmp_path / "toy.npz")

    def run(**outage: Any) -> tuple[dict[str, tuple[int, ...]], int, int]:
        members = [{"name": "first"}, {"name": "near", **outage}]
        made = scenario("vote", "all", members, parallel="node")
        variant = made.variants[0].model_copy(update={"execution_mode": execution_mode})
        replica = World(made, variant, tmp_path).replica()
        for request in simulated_requests(made, float(len(PROMPTS)), tmp_path):
            replica.add(request, 0.0)
        live = dict(replica.live)
        while replica.held:
            list(replica.step())
            replica.engine.check_integrity()
        rows = replica.steps.rows
        return {id: tuple(each.tokens) for id, each in live.items()}, len(rows), sum(row[3] for row in rows)

    wanted = {str(n): request.output for n, request in enumerate(recording.requests)}
    whole, lost, back = run(), run(outages=[{"at": 0, "seconds": 1e6}]), run(outages=[{"at": 5, "seconds": 10}])
    assert whole[0] == lost[0] == back[0] == wanted
    assert whole[2] > back[2] > lost[2], "accepted tokens"
    assert lost[2] > 0 or execution_mode == "draft-for-outcomes", "no step waits for a drafter that is often wrong"
    assert whole[1] < lost[1]


@pytest.mark.parametrize("part", ["stage", "replica"])
@pytest.mark.parametrize("execution_mode", ["sequential", "pipelined", "draft-ahead", "draft-for-outcomes"])
def test_lost_machines_of_the_target_change_no_token(
    recording: Recording, tmp_path: Path, execution_mode: str, part: Literal["stage", "replica"]
) -> None:
    """Requests go on from their tokens, whether the caches are lost or the engine."""
    recording.save(tmp_path / "toy.npz")
    made = scenario("vote", "all", [{"name": "first"}, {"name": "near"}], parallel="node")
    outage = TargetOutageConfig(part=part, at=5.0, seconds=3.0)
    variant = made.variants[0].model_copy(update={"execution_mode": execution_mode, "outages": (outage,)})
    first, second = (World(made, variant, tmp_path).replica(number) for number in range(2))
    for request in simulated_requests(made, float(len(PROMPTS)), tmp_path):
        first.add(request, 0.0)
    live = dict(first.live)
    while first.held and not first.lost:
        list(first.step())
    before = {id: len(each.tokens) for id, each in live.items()}
    for request, each in first.lose() if first.lost else ():
        second.take(request, each, first.clock.now)
    while second.held:
        list(second.step())
    assert {id: tuple(each.tokens) for id, each in live.items()} == {
        str(n): request.output for n, request in enumerate(recording.requests)
    }
    assert first.engine.metrics().verifier_losses == (part == "stage")
    assert (part == "stage") == (before == {id: len(each.tokens) for id, each in live.items()})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"members": [{"name": "third"}]}, "members.name is 'third'"),
        ({"combiner": "chorus"}, "combiner is 'chorus'"),
        ({"routing": "chorus"}, "routing is 'chorus'"),
        ({"combiner": "mix", "parallel": "node"}, "draws whole drafts"),
        ({"policy": "oracle", "combiner": "union"}, "policy is 'oracle'"),
    ],
)
def test_mistakes_are_named(recording: Recording, tmp_path: Path, given: dict[str, Any], sentence: str) -> None:
    recording.save(tmp_path / "toy.npz")
    drafting = dict(given)
    policy = drafting.pop("policy", "fixed")
    made = scenario(**{"combiner": "vote", **drafting})
    variant = made.variants[0].model_copy(update={"policy": policy})
    with pytest.raises(InvalidInput) as error:
        simulate(made.model_copy(update={"variants": (variant,)}), tmp_path)
    assert sentence in str(error.value)
