"""Lost engines and lost stages of a simulation: the times are those of sums, and no request is lost."""

from __future__ import annotations

from typing import Any

import pytest

from cospec.errors import InvalidInput
from cospec.plugin_options import parse
from cospec.simulation.run import simulate
from cospec.simulation.scenario import Scenario

STEP = 0.01  # seconds of every forward
OFF = {"name": "off", "policy": "off"}
ONE = {"requests": 1, "domains": [{"prompt": {"mean": 32}, "output": {"mean": 10}}]}  # ten forwards


def scenario(outages: list[dict[str, Any]], **changes: Any) -> Scenario:
    variant = {**changes.pop("variant", OFF), "outages": outages}
    target = {"cost": {"fixed": STEP}, **changes.pop("target", {})}
    return parse(Scenario, {"target": target, "variants": [variant], **changes})


def only(outages: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    (found,) = simulate(scenario(outages, **changes))["runs"]
    return dict(found)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_lost_stage_costs_the_step_the_wait_and_a_prefill(stages: int) -> None:
    """Four forwards, half a forward that is lost, a second without stages, and six forwards."""
    outage = {"part": "stage", "at": 4.5 * STEP, "seconds": 1}
    found = only([outage], **ONE, target={"stages": stages})
    assert found["latency"]["mean"] == pytest.approx(10.5 * STEP + 1, abs=1e-6)
    assert found["ttft"]["mean"] == pytest.approx(STEP, abs=1e-6)
    assert (found["verifier_losses"], found["replayed"], found["failed"]) == (1, 0, 0)


def test_a_stage_that_is_lost_between_two_steps_loses_the_caches_too() -> None:
    """Every forward follows 4 ms of a drafter that is never right; the outage begins during the second draft."""
    drafting = {"cost": {"fixed": 0.004}}
    domains = [{"prompt": {"mean": 32}, "output": {"mean": 10}, "acceptance": 0.0}]
    variant = {"name": "k=1", "num_speculative_tokens": 1}
    given = {"requests": 1, "domains": domains, "drafting": drafting, "variant": variant}
    whole = only([{"part": "stage", "at": 50, "seconds": 1}], **given)
    found = only([{"part": "stage", "at": 2 * STEP + 0.004 + 0.002, "seconds": 1}], **given)
    assert whole["verifier_losses"] == 0 and found["verifier_losses"] == 1
    assert whole["latency"]["mean"] == pytest.approx(10 * STEP + 8 * 0.004, abs=1e-6)
    # Two tokens are known. A prefill gives the third, six steps follow with drafts, and one without.
    assert found["latency"]["mean"] == pytest.approx(0.026 + 1 + 8 * STEP + 6 * 0.004, abs=1e-6)


def test_all_steps_in_flight_are_lost_at_once() -> None:
    """Of two requests in turn, the first has four tokens and the second three at 4.2 forwards, half a forward apart.

    After the loss each runs alone for a forward. Then the second, which goes first, has six forwards left.
    """
    target, arrivals = {"stages": 2, "steps_in_flight": 2}, {"kind": "closed", "concurrency": [2]}
    outage = {"part": "stage", "at": 4.2 * STEP, "seconds": 1}
    found = only([outage], **{**ONE, "requests": 2}, target=target, arrivals=arrivals)
    assert found["seconds"] == pytest.approx(4.2 * STEP + 1 + 2 * STEP + 0.5 * STEP + 6 * STEP, abs=1e-6)
    assert (found["verifier_losses"], found["rounds"]) == (1, 20)


@pytest.mark.parametrize(("replicas", "latency"), [(2, 10 * STEP), (1, 5.5 * STEP + 1 + 4 * STEP)])
def test_requests_of_a_lost_engine_go_on_elsewhere_or_wait(replicas: int, latency: float) -> None:
    """The step that runs ends first, so five tokens are known; a sole engine is back after a second."""
    found = only([{"part": "replica", "at": 4.5 * STEP, "seconds": 1}], **ONE, target={"replicas": replicas})
    assert found["latency"]["mean"] == pytest.approx(latency, abs=1e-6)
    assert found["ttft"]["mean"] == pytest.approx(STEP, abs=1e-6)
    assert (found["verifier_losses"], found["replayed"], found["failed"]) == (0, 1, 0)


def test_a_request_that_comes_during_an_outage_takes_an_engine_that_is_there() -> None:
    outage = {"part": "replica", "at": 0, "seconds": 100}
    given = {"requests": 20, "domains": ONE["domains"], "arrivals": {"rates": [100]}}
    found = only([outage], **given, target={"replicas": 2})
    assert found["seconds"] < 5 and found["replayed"] == 0
    assert only([outage, {**outage, "replica": 1}], **given, target={"replicas": 2})["seconds"] > 100


@pytest.mark.parametrize("at", [0.0, 0.004, STEP, STEP + 0.002, 0.5])
def test_a_stage_may_fail_while_no_step_runs(at: float) -> None:
    """At the start, while the engine is idle, at the end of a step, and in the time between two steps."""
    found = only([{"part": "stage", "at": at, "seconds": 1}], **{**ONE, "requests": 3}, target={"overhead": 0.004})
    assert (found["requests"], found["verifier_losses"], found["failed"]) == (3, 1, 0)


@pytest.mark.parametrize("longer", [0, 1])
def test_requests_wait_for_the_engine_that_is_back_first(longer: int) -> None:
    """Both engines are out when the request has five tokens; one for a second, and one for a hundred."""
    outages = [
        {"part": "replica", "replica": number, "at": 4.5 * STEP, "seconds": 100 if number == longer else 1}
        for number in range(2)
    ]
    found = only(outages, **ONE, target={"replicas": 2})
    assert found["latency"]["mean"] == pytest.approx(5.5 * STEP + 1 + 4 * STEP, abs=STEP)


def test_outages_that_overlap_are_one() -> None:
    outages = [{"part": "stage", "at": at * STEP, "seconds": 1} for at in (4.5, 54.5, 154.5)]
    found = only(outages, **ONE)
    assert found["latency"]["mean"] == pytest.approx((254.5 + 6) * STEP, abs=1e-6)
    assert found["verifier_losses"] == 1


def test_a_closed_loop_uses_an_engine_again_that_was_lost() -> None:
    """Two requests at a time, whose forwards take a time per request: two engines are faster than one."""
    given = {
        "requests": 40,
        "domains": ONE["domains"],
        "arrivals": {"kind": "closed", "concurrency": [2]},
        "target": {"cost": {"sequence": STEP}, "replicas": 2},
    }
    whole, lost = only([], **given), only([{"part": "replica", "at": 0.23, "seconds": 0.1}], **given)
    assert lost["seconds"] - whole["seconds"] < 0.3, "the time of one engine alone is twice as long"
    assert lost["replayed"] == 1


def test_three_losses_without_a_token_in_between_end_a_request() -> None:
    outages = [{"part": "stage", "at": STEP * (0.5 + number), "seconds": STEP / 4} for number in range(3)]
    found = only(outages, **ONE)
    assert (found["requests"], found["verifier_losses"], found["failed"]) == (0, 3, 1)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("execution_mode", ["sequential", "pipelined", "draft-ahead"])
@pytest.mark.parametrize("part", ["stage", "replica"])
def test_requests_are_conserved(part: str, execution_mode: str, steps_in_flight: int) -> None:
    """Little's law: the mean number in the system is throughput times mean latency."""
    outages = [{"part": part, "at": at, "seconds": 0.4, "replica": replica} for at, replica in ((0.5, 0), (1.2, 1))]
    given = {
        "requests": 60,
        "domains": [{"prompt": {"mean": 32}, "output": {"mean": 40, "variation": 0.5}}],
        "drafting": {"cost": {"fixed": 0.001}},
        "arrivals": {"rates": [30]},
        "target": {"stages": 2, "steps_in_flight": steps_in_flight, "replicas": 2},
        "variant": {"name": "k=3", "num_speculative_tokens": 3, "execution_mode": execution_mode},
    }
    found = only(outages, **given)
    assert found["requests"] == 60 and found["failed"] == 0
    assert (found["verifier_losses"], found["replayed"] > 0) == ((2, False) if part == "stage" else (0, True))
    distribution = found["requests_per_second"] * found["latency"]["mean"]
    assert found["mean_in_system"] == pytest.approx(distribution, rel=1e-3)
    assert found["latency"]["p99"] > only([], **given)["latency"]["p99"]


@pytest.mark.parametrize(
    ("outage", "changes", "field"),
    [
        ({"part": "replica", "replica": 1}, {}, "outages[0] of variant off.replica"),
        ({"part": "stage"}, {"pace": [{"seconds": 1, "factor": 2}]}, "outages[0] of variant off.part"),
        ({"part": "disk"}, {}, "variants[0].outages[0].part"),
    ],
)
def test_mistakes_are_named(outage: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as error:
        simulate(scenario([{"at": 1, "seconds": 1, **outage}], **changes))
    assert error.value.field == field
