"""Declared prices as prices of tokens: the formula, the metrics of a server, and a simulated comparison."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from cospec.bench.metrics import Selection, summarise
from cospec.bench.request_record import Chunk, Timing
from cospec.config import EngineConfig
from cospec.core.types import Event
from cospec.metrics.engine_counters import EngineMetrics, merge, price_per_million
from cospec.runtime.engine_client import EngineStatus
from cospec.server.machine_costs import MachineCosts
from cospec.server.metrics import ServerMetrics
from cospec.server.node_metrics import COUNTERS, GAUGES
from cospec.simulation.run import simulate
from cospec.simulation.scenario import Scenario

SCENARIO = Path("examples/scenarios/cosine-cost.yaml")


def test_price_of_a_million_tokens() -> None:
    assert price_per_million(3.6, tokens=1000, seconds=10) == pytest.approx(10.0)
    assert price_per_million(3.6, tokens=0, seconds=10) is None


def test_prices_of_a_configuration() -> None:
    drafters = [{"name": "a", "method": "ngram", "cost_per_hour": 0.25}, {"method": "suffix"}]
    speculative = {"method": "pool", "drafters": drafters}
    config = EngineConfig.build({"cost_per_hour": 2, "speculative_config": speculative})
    assert config.prices == {"target": 2, "drafter": 0, "a": 0.25, "suffix": 0}


def write(metrics: ServerMetrics, tokens: int) -> None:
    """Deliver an output of so many tokens."""
    now = time.monotonic()
    metrics.clock(now).observe(Event("r", "r", 0, "", (1,) * tokens, ("target",) * tokens), now)


@pytest.mark.parametrize("prices", [{}, {"target": 2.0, "a": 0.5}])
def test_server_shows_declared_prices_only(prices: dict[str, float]) -> None:
    replicas = [asdict(EngineMetrics(generation_tokens=50, prices=prices | {"drafter": 0.0})) for _ in range(2)]
    engine, metrics = merge(replicas), ServerMetrics("m")
    write(metrics, 100)
    text = metrics.render(engine, EngineStatus(True, 0, 0, 0)).decode()
    assert ('cospec:cost_per_hour{component="a",model_name="m"} 1.0' in text) == bool(prices)
    assert ("cospec:price_per_million_tokens{" in text) == bool(prices)
    assert 'component="drafter"' not in text


def test_each_connection_of_a_node_has_its_price() -> None:
    nodes = [("peer", 1.0), ("peer", 1.0), ("target", 0.001)]
    engine = asdict(EngineMetrics(prices={"target": 4.0}))
    engine["nodes"] = [
        {
            "node": name,
            "drafter": "a",
            "state": "ready",
            **dict.fromkeys((*GAUGES, *COUNTERS), 0.0),
            "cost_per_hour": cost,
        }
        for name, cost in nodes
    ]
    text = ServerMetrics("m").render(engine, EngineStatus(True, 0, 0, 0)).decode()
    costs = {line for line in text.splitlines() if line.startswith("cospec:cost_per_hour{")}
    assert costs == {
        'cospec:cost_per_hour{component="target",model_name="m"} 4.0',
        'cospec:cost_per_hour{component="node:peer",model_name="m"} 2.0',
        'cospec:cost_per_hour{component="node:target",model_name="m"} 0.001',
    }


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_machines_cost_while_they_take_part() -> None:
    """A node joins after an hour and leaves an hour later; what is asked in between changes nothing."""
    clock = Clock()
    meter = MachineCosts(clock)
    alone, both = {"target": 4.0}, {"target": 4.0, "node:a": 1.0}
    assert meter.spent(alone) == 0.0
    meter.note(alone)
    for prices, expected in ((both, 4.0), (alone, 9.0), (alone, 13.0)):
        clock.now += 3600.0
        assert meter.spent(both) == pytest.approx(expected)
        assert meter.spent({}) == pytest.approx(expected)
        for _ in range(2):  # a price that fell may be that of a replica that did not answer
            meter.note(prices)
    metrics = ServerMetrics("m", clock)
    write(metrics, 1000)
    metrics.machine_costs.note(alone)
    clock.now += 1800.0
    engine = asdict(EngineMetrics(prices=both))  # the node has just joined
    text = metrics.render(engine, EngineStatus(True, 0, 0, 0)).decode()
    assert 'cospec:price_per_million_tokens{model_name="m"} 2000.0' in text
    text = metrics.render(asdict(EngineMetrics()), EngineStatus(True, 0, 0, 0)).decode()  # all have left
    assert 'cospec:price_per_million_tokens{model_name="m"} 2000.0' in text and "cost_per_hour{" not in text


def test_a_replica_that_does_not_answer_once_costs_as_before() -> None:
    clock = Clock()
    meter = MachineCosts(clock)
    for noted, expected in ((4.0, 0.0), (2.0, 4.0), (4.0, 8.0), (2.0, 12.0), (2.0, 16.0), (2.0, 18.0)):
        assert meter.spent({}) == pytest.approx(expected)
        meter.note({"target": noted})
        clock.now += 3600.0


def test_first_prices_hold_from_the_start() -> None:
    clock = Clock()
    meter = MachineCosts(clock)
    clock.now += 1800.0
    assert meter.spent({"target": 4.0}) == pytest.approx(2.0)
    meter.note({"target": 4.0})
    assert meter.spent({}) == pytest.approx(2.0)


def test_an_engine_that_starts_again_changes_no_price() -> None:
    metrics, prices = ServerMetrics("m"), []
    write(metrics, 1000)
    time.sleep(0.1)
    for generated in (1000, 10):  # the second process has written few tokens
        engine = asdict(EngineMetrics(generation_tokens=generated, prices={"target": 4.0}))
        text = metrics.render(engine, EngineStatus(True, 0, 1, 0)).decode()
        prices += [
            float(line.split()[-1]) for line in text.splitlines() if line.startswith("cospec:price_per_million_tokens{")
        ]
    assert 0 < prices[0] <= prices[1] < 50 * prices[0]


def test_benchmark_prices_its_output() -> None:
    timing = Timing(id="r", arrival=0.0, sent=0.0, end=10.0, chunks=(Chunk(0.0, "a", 1), Chunk(10.0, "b", 999)))
    found = summarise([timing], 10.0, Selection(cost_per_hour=3.6))
    assert found["price_per_million_tokens"] == pytest.approx(10.0)
    assert "price_per_million_tokens" not in summarise([timing], 10.0, Selection())


def test_simulation_prices_each_baseline() -> None:
    given = Scenario.read(SCENARIO)
    arrivals = given.arrivals.model_copy(update={"concurrency": (16,)})
    scenario = given.model_copy(update={"requests": 30, "arrivals": arrivals})
    runs = {run["variant"]: run for run in simulate(scenario, SCENARIO.parent)["runs"]}
    server, node = scenario.target.cost_per_hour, scenario.drafting.cost_per_hour
    for name, nodes in {"plain": 0, "one-drafter": 1, "specinfer": 4, "pipeinfer": 1, "cosine": 4}.items():
        run = runs[name]
        tokens = run["throughput"] * run["seconds"]
        expected = price_per_million(server + nodes * node, tokens, run["seconds"])
        assert expected is not None
        assert math.isclose(run["price_per_million_tokens"], expected, rel_tol=1e-3)
