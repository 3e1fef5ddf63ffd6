"""A simulation is the engine itself on another clock: deterministic, conserving, and as fast as its sums say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cospec.cli.main import app
from cospec.distributed.links import RETRANSMISSION
from cospec.errors import InvalidInput
from cospec.plugin_options import parse
from cospec.simulation.clock import SimulatedExecutor, VirtualClock
from cospec.simulation.run import World, run, simulate
from cospec.simulation.scenario import Scenario
from cospec.simulation.workload import simulated_requests

TARGET = {"cost": {"context": 1e-8, "slopes": [2e-5, 1e-4], "knees": [64], "fixed": 0.01}}
DRAFT = {"cost": {"slopes": [1e-6], "fixed": 0.001}}
SMALL = {"prompt": {"mean": 32}, "output": {"mean": 40, "variation": 0.5}}


def scenario(**changes: Any) -> Scenario:
    given = {
        "requests": 40, "target": TARGET, "drafting": DRAFT, "domains": [{**SMALL, "acceptance": 0.7}],
        "arrivals": {"rates": [20]}, "variants": [{"name": "k=3", "num_speculative_tokens": 3}],
    }  # fmt: skip
    return parse(Scenario, {**given, **changes})


def only(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = simulate(scenario(**changes))["runs"]
    return found


@pytest.mark.parametrize("execution_mode", ["sequential", "pipelined", "draft-ahead", "draft-for-outcomes"])
@pytest.mark.parametrize("policy", ["off", "fixed", "goodput", "slope", "oracle", "random"])
def test_every_policy_runs_under_every_round_and_again_the_same(policy: str, execution_mode: str) -> None:
    variants = [{"name": "v", "policy": policy, "execution_mode": execution_mode}]
    found = only(variants=variants)
    assert found == only(variants=variants)
    assert found != only(variants=variants, seed=1)
    assert found["requests"] == 40
    assert found["seconds"] > 0


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", ["open", "closed", "segments"])
def test_requests_are_conserved(kind: str, replicas: int) -> None:
    """Little's law: the mean number in the system, counted at every step, is throughput times mean latency."""
    segments = [{"rate": 40, "seconds": 0.5}, {"rate": 5, "seconds": 1}]
    arrivals = {"kind": kind, "rates": [15] if kind == "open" else [1], "concurrency": [6], "segments": segments}
    found = only(arrivals=arrivals, target={**TARGET, "replicas": replicas}, requests=60)
    assert found["requests"] == 60
    distribution = found["requests_per_second"] * found["latency"]["mean"]
    assert found["mean_in_system"] == pytest.approx(distribution, rel=1e-3)


def test_without_speculation_times_are_the_sums_of_rounds() -> None:
    """One request alone: a prefill of 32 tokens and 9 single steps, to the microsecond."""
    domain = {"prompt": {"mean": 32}, "output": {"mean": 10}}
    found = only(requests=1, domains=[domain], variants=[{"name": "off", "policy": "off"}])
    prefill = 0.01 + 32 * 2e-5
    steps = sum(0.01 + 2e-5 + 1e-8 * context for context in range(32, 41))
    assert found["latency"]["mean"] == pytest.approx(prefill + steps, abs=1e-6)
    assert found["ttft"]["mean"] == pytest.approx(prefill, abs=1e-6)


def test_idle_times_are_what_the_other_side_takes() -> None:
    """One request in turn: the drafter's passes leave the target idle, the forwards leave the drafter idle."""
    one = {"requests": 1, "domains": [{"prompt": {"mean": 1}, "output": {"mean": 41}, "acceptance": 0.0}]}
    costs = {"target": {"cost": {"fixed": 0.03}}, "drafting": {"cost": {"fixed": 0.004}}}
    found = only(**one, **costs, variants=[{"name": "k=1", "num_speculative_tokens": 1}])
    # The prompt's forward, 39 steps with a draft, and the last token's.
    draft, target = 39 * 0.004, 41 * 0.03
    assert found["seconds"] == pytest.approx(draft + target, abs=1e-6)
    assert found["target_idle"] == pytest.approx(draft / (draft + target), abs=1e-4)
    assert found["drafters_idle"] == pytest.approx(target / (draft + target), abs=1e-4)


def test_idle_time_of_drafters_is_the_mean_over_their_machines() -> None:
    drafting = {**DRAFT, "nodes": 4}
    arrivals = {"kind": "closed", "concurrency": [16]}
    variants = [{"name": "p", "num_speculative_tokens": 3, "execution_mode": "pipelined"}]
    one, four = (only(drafting=each, arrivals=arrivals, variants=variants) for each in (DRAFT, drafting))
    works = [1 - found["drafters_idle"] for found in (one, four)]
    assert works[1] == pytest.approx(works[0] / 4, rel=0.05) and works[0] > 0
    assert only(variants=[{"name": "off", "policy": "off"}])["drafters_idle"] is None, "no drafter worked"


def test_acceptance_is_what_was_asked_for() -> None:
    found = only(requests=300, domains=[{"acceptance": 0.6, "prompt": {"mean": 8}, "output": {"mean": 60}}])
    assert found["acceptance"] == pytest.approx(0.6, abs=0.02)
    found = only(requests=300, domains=[{"acceptance": [0.9, 0.1, 0.0], "prompt": {"mean": 8}, "output": {"mean": 60}}])
    assert found["mean_acceptance_length"] == pytest.approx(1 + 0.9 + 0.09, abs=0.03)


def test_variants_meet_the_same_requests() -> None:
    made = scenario()
    first, second = (list(simulated_requests(made, 5.0, Path())) for _ in range(2))
    assert first == second
    assert [request.difficulty for request in first] == [
        request.difficulty for request in simulated_requests(made, 50.0, Path())
    ]


def test_a_trace_of_acceptances_is_followed(tmp_path: Path) -> None:
    (tmp_path / "easy.jsonl").write_text("[1, 1, 1, 1, 1, 1, 1, 1]\n[0, 0, 0, 0]\n", encoding="utf-8")
    made = scenario(requests=2, domains=[{"trace": "easy.jsonl"}], arrivals={"rates": [0.1]})
    (found,) = simulate(made, tmp_path)["runs"]
    # After the prompt's own token: drafts of 3 and 3 are right; then 1, 1 and 1 at a time.
    assert found["rounds"] == (1 + 2) + (1 + 3)


def test_trees_of_heads() -> None:
    """Widths 3 and 2 find a token with 1 - (1 - α)^w at each level."""
    variants = [{"name": "t", "policy": "fixed", "num_speculative_tokens": 2, "widths": [3, 2], "max_nodes": 9}]
    drafting = {"kind": "heads", "cost": {"fixed": 0.0005}}
    domains = [{"acceptance": 0.5, "prompt": {"mean": 8}, "output": {"mean": 60}}]
    found = only(requests=300, variants=variants, drafting=drafting, domains=domains)
    assert found["mean_acceptance_length"] == pytest.approx(1 + 0.875 + 0.875 * 0.75, abs=0.05)


def test_pipelined_gains_what_the_paper_promises() -> None:
    """Drafting half as long as verification, a target bound by its tokens, enough requests: at least 1.3 times."""
    domains = [{"acceptance": 0.8, "prompt": {"mean": 16}, "output": {"mean": 64}}]
    world = {
        "target": {"cost": {"slopes": [4e-4], "fixed": 0.002}},
        "drafting": {"cost": {"slopes": [2.5e-4], "fixed": 0.001}},
        "domains": domains, "arrivals": {"kind": "closed", "concurrency": [32]}, "requests": 128,
    }  # fmt: skip
    speed = {}
    for execution_mode in ("sequential", "pipelined"):
        found = only(
            **world, variants=[{"name": execution_mode, "num_speculative_tokens": 4, "execution_mode": execution_mode}]
        )
        speed[execution_mode] = found["throughput"]
        assert (found["overlap"] > 1.3) == (execution_mode == "pipelined")
    assert speed["pipelined"] > 1.3 * speed["sequential"]


@pytest.mark.parametrize(("acceptance", "least"), [(0.35, 0.95), (0.8, 1.5)])
def test_pipelined_goodput_is_no_slower_than_no_drafts(acceptance: float, least: float) -> None:
    """A forward that takes as long for few tokens as for many: a half batch pays where drafts commit twice as much."""
    world = {
        "target": {"cost": {"slopes": [5e-4], "fixed": 0.1}}, "drafting": {"cost": {"fixed": 0.016}},
        "domains": [{"acceptance": acceptance, "prompt": {"mean": 16}, "output": {"mean": 200}}],
        "arrivals": {"kind": "closed", "concurrency": [6]}, "requests": 24,
    }  # fmt: skip
    variants = ({"policy": "off"}, {"policy": "goodput"}, {"num_speculative_tokens": 4})
    plain, goodput, fixed = (
        only(**world, variants=[{"name": "v", "execution_mode": "pipelined", **variant}])["throughput"]
        for variant in variants
    )
    assert goodput >= least * plain and goodput >= 0.95 * fixed


def test_pipelined_goodput_drafts_after_times_with_one_request() -> None:
    """One request waits for its draft; this must not make drafts look dear when many requests come."""
    segments = [{"seconds": 60, "rate": 0.25}, {"seconds": 30, "rate": 2.5}]
    world = {
        "target": {"cost": {"slopes": [5e-4], "fixed": 0.1}}, "drafting": {"cost": {"fixed": 0.016}},
        "domains": [{"acceptance": 0.7, "prompt": {"mean": 16}, "output": {"mean": 48}}],
        "arrivals": {"kind": "segments", "segments": segments, "rates": [1]}, "requests": 120,
    }  # fmt: skip
    plain, goodput = (
        only(**world, variants=[{"name": "v", "execution_mode": "pipelined", "policy": policy}])["latency"]["mean"]
        for policy in ("off", "goodput")
    )
    assert goodput < 0.85 * plain


def test_more_drafter_nodes_and_stages_help_where_they_are_short() -> None:
    busy = {"kind": "closed", "concurrency": [32]}
    slow = {"cost": {"slopes": [1e-3], "fixed": 0.001}}
    variants = [{"name": "p", "num_speculative_tokens": 4, "execution_mode": "pipelined"}]
    one, four = (
        only(arrivals=busy, drafting={**slow, "nodes": nodes}, variants=variants)["throughput"] for nodes in (1, 4)
    )
    assert four >= one
    heavy = {"cost": {"slopes": [1e-3], "fixed": 0.001}}
    one, four = (only(arrivals=busy, target={**heavy, "stages": stages})["throughput"] for stages in (1, 4))
    assert four > 1.5 * one


def test_steps_in_flight_take_the_time_of_the_formula() -> None:
    """Microbatches of two requests, each ``stage`` seconds in every stage; the last result needs no link.

    A stage does not wait for its link, so a microbatch follows the one before after ``stage`` seconds.
    """
    length, links, stage = 50, 3 * 0.001, 0.02 / 4
    wanted = {
        1: length * (7 * stage + links),  # four microbatches fill four stages, and drain them
        2: length * (5 * stage + links) + 2 * stage,
        4: length * (4 * stage + links) + 3 * stage,
    }
    outputs = {"prompt": {"mean": 1}, "output": {"mean": length}}
    for count, seconds in wanted.items():
        target = {"cost": {"fixed": 0.02}, "stages": 4, "link": 0.001, "steps_in_flight": count}
        found = only(
            target=target, requests=8, domains=[outputs], arrivals={"kind": "closed", "concurrency": [8]},
            variants=[{"name": "off", "policy": "off"}],
        )  # fmt: skip
        assert found["seconds"] == pytest.approx(seconds, abs=2e-6), count


def test_links_have_jitter_loss_and_bandwidth() -> None:
    """A step of one token crosses three links; each has the delays of the engine's links."""
    length = 50
    outputs = {"prompt": {"mean": 1}, "output": {"mean": length}}

    def seconds(link: object) -> float:
        target = {"cost": {"fixed": 0.02}, "stages": 4, "link": link, "bytes_per_token": 1000}
        variants = [{"name": "off", "policy": "off"}]
        arrivals = {"kind": "closed", "concurrency": [1]}
        found: float = only(target=target, requests=1, domains=[outputs], arrivals=arrivals, variants=variants)[
            "seconds"
        ]
        return found

    plain = length * (0.02 + 3 * 0.001)
    assert seconds(0.001) == seconds({"delay": 0.001}) == pytest.approx(plain, abs=2e-6)
    assert seconds({"delay": 0.001, "bandwidth": 1e6}) == pytest.approx(plain + length * 3 * 0.001, abs=2e-6)
    jitter = seconds({"delay": 0.001, "jitter": 0.002}) - plain
    assert jitter == pytest.approx(length * 3 * 0.001, rel=0.25)
    lost = (seconds({"delay": 0.001, "loss": 0.1}) - plain) / (RETRANSMISSION + 2 * 0.001)
    assert lost == pytest.approx(round(lost)) and lost == pytest.approx(length * 3 * 0.1 / 0.9, rel=0.5)


@pytest.mark.parametrize("execution_mode", ["sequential", "pipelined", "draft-ahead", "draft-for-outcomes", "auto"])
def test_steps_in_flight_run_under_every_execution_mode(execution_mode: str) -> None:
    target = {**TARGET, "stages": 4, "steps_in_flight": 4}
    variants = [
        {"name": policy, "policy": policy, "execution_mode": execution_mode, "num_speculative_tokens": length}
        for policy, length in (("off", 0), ("fixed", 3), ("goodput", "auto"), ("slope", 4))
    ]
    arrivals = {"kind": "closed", "concurrency": [16]}
    found = simulate(scenario(target=target, variants=variants, arrivals=arrivals))["runs"]
    assert [run["requests"] for run in found] == [40] * 4
    assert found == simulate(scenario(target=target, variants=variants, arrivals=arrivals))["runs"]
    speeds = {run["variant"]: run["throughput"] for run in found}
    assert speeds["goodput"] > 0.9 * speeds["off"]


def test_a_variant_has_steps_in_flight_of_its_own() -> None:
    target, arrivals = {**TARGET, "stages": 4}, {"kind": "closed", "concurrency": [16]}
    variants = [{"name": "two", "num_speculative_tokens": 3, "steps_in_flight": 2}]
    found = only(target=target, arrivals=arrivals, variants=variants)
    same = only(
        target={**target, "steps_in_flight": 2},
        arrivals=arrivals,
        variants=[{"name": "two", "num_speculative_tokens": 3}],
    )
    assert (
        found == same != only(target=target, arrivals=arrivals, variants=[{"name": "two", "num_speculative_tokens": 3}])
    )


def test_steps_in_flight_need_a_steady_pace() -> None:
    with pytest.raises(InvalidInput, match="steps_in_flight is 2"):
        scenario(target={**TARGET, "steps_in_flight": 2}, pace=[{"seconds": 1, "factor": 2}]).check()
    variants = [{"name": "v", "steps_in_flight": 2}]
    with pytest.raises(InvalidInput, match="steps_in_flight of variant v is 2"):
        scenario(variants=variants, pace=[{"seconds": 1, "factor": 2}]).check()


def test_the_oracle_is_not_beaten() -> None:
    found = simulate(
        scenario(
            requests=80,
            variants=[{"name": name, "policy": name, "num_speculative_tokens": 8} for name in ("oracle", "random")]
            + [{"name": "goodput"}, {"name": "k=5", "num_speculative_tokens": 5}],
        )
    )["runs"]
    latency = {each["variant"]: each["latency"]["mean"] for each in found}
    assert min(latency, key=latency.__getitem__) == "oracle"
    assert latency["goodput"] < latency["random"]


def test_calls_of_a_handle_overlap_in_simulated_time() -> None:
    class Half:
        def propose(self, contexts: Any, budgets: Any) -> list[Any]:
            clock.advance(0.5)
            return ["done"]

        def commit(self, commits: Any) -> None: ...

        def free(self, ids: Any) -> None: ...

    clock = VirtualClock()
    executor = SimulatedExecutor(Half(), clock, nodes=2)
    first, second, third = (executor.submit("propose", [], []) for _ in range(3))
    assert not first.done() and clock.now == 0
    assert first.result() == ["done"] and clock.now == 0.5
    assert second.done() and not third.done(), "two nodes work at once, the third batch waits for one"
    with pytest.raises(TimeoutError):
        third.result(0.2)
    assert clock.now == pytest.approx(0.7)
    assert third.result(1.0) == ["done"] and clock.now == 1.0 and executor.busy == 1.5


def test_work_takes_its_time_by_the_pace_and_waiting_does_not() -> None:
    clock = VirtualClock([(2.0, 1.0), (1.0, 4.0)])
    assert clock.advance(1.5) == 1.5
    assert clock.advance(1.0) == 2.5, "half a second as it should be, half a second four times as slow"
    clock.reach(100.0)
    assert clock.advance(0.5) == 2.0 and clock.advance(2.0) == 2.0, "it goes on where work stopped, and begins again"
    assert clock.advance(6.0) == 12.0 and clock.now == 116.0


def test_slow_moments_lengthen_p99_and_shorten_p50_latency() -> None:
    given = {"requests": 200, "arrivals": {"rates": [2]}}
    steady = only(**given)["latency"]
    slow = only(**given, pace=[{"seconds": 3.0, "factor": 0.8}, {"seconds": 0.3, "factor": 3.0}])["latency"]
    assert slow["p99"] > 1.1 * steady["p99"] and slow["p50"] < steady["p50"], (slow, steady)


def test_no_cache_page_is_lost() -> None:
    made = scenario(kv_tokens=1024, arrivals={"kind": "closed", "concurrency": [32]})
    world = World(made, made.variants[0], Path())
    found = run(world, 32.0)
    assert found["requests"] == 40
    replica = world.replica()
    for request in simulated_requests(made, 32.0, Path()):
        replica.add(request, 0.0)
    preempted = 0
    while replica.held:
        list(replica.step())
        replica.engine.check_integrity()
        preempted = replica.engine.metrics().num_preemptions
    assert preempted > 0 and replica.engine.metrics().kv_cache_usage == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"requests": 0}, "requests"),
        ({"variants": [{"name": "v", "execution_mode": "sideways"}]}, "variants[0].execution_mode"),
        ({"variants": [{"name": "v", "policy": "sideways"}]}, "variants[0].policy"),
        ({"arrivals": {"kind": "segments"}}, "arrivals"),
        ({"pace": [{"seconds": 1.0, "factor": 0}]}, "pace[0].factor"),
        ({"target": {"cost": {"profile": "nothing.json"}}}, "profile"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as error:
        simulate(scenario(**changes))
    assert (error.value.field or "").startswith(field)


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    import yaml
    from typer.testing import CliRunner

    made = {"requests": 8, "target": TARGET, "variants": [{"name": "k=2", "num_speculative_tokens": 2}]}
    file, output, plot = tmp_path / "s.yaml", tmp_path / "s.json", tmp_path / "s.png"
    file.write_text(yaml.safe_dump(made), encoding="utf-8")
    pytest.importorskip("matplotlib")
    found = CliRunner().invoke(
        app, ["simulate", str(file), "--output", str(output), "--plot", str(plot), "--requests", "5"]
    )
    assert found.exit_code == 0, found.output
    assert json.loads(output.read_text(encoding="utf-8"))["runs"][0]["requests"] == 5
    assert plot.stat().st_size > 0 and "k=2" in found.output


def test_changing_rates_keep_their_shares() -> None:
    arrivals = {"kind": "segments", "rates": [1], "segments": [{"rate": 90, "seconds": 1}, {"rate": 10, "seconds": 1}]}
    made = scenario(arrivals=arrivals, requests=4000)
    times = np.array([request.due for request in simulated_requests(made, 1.0, Path())])
    assert ((times % 2) < 1).mean() == pytest.approx(0.9, abs=0.02)
    assert len(times) / times[-1] == pytest.approx(50, rel=0.05)
