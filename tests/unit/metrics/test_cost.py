"""Declared prices as prices of tokens: the formula, the metrics of a server, and a simulated comparison."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from cospec.bench.metrics import Selection, summarise
from cospec.bench.timing import Chunk, Timing
from cospec.config import EngineConfig
from cospec.metrics.engine import EngineMetrics, price_per_million
from cospec.runtime.engine_client import EngineStatus
from cospec.server.metrics import ServerMetrics
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


@pytest.mark.parametrize("prices", [{}, {"target": 2.0, "a": 0.5}])
def test_server_shows_declared_prices_only(prices: dict[str, float]) -> None:
    engine = asdict(EngineMetrics(generation_tokens=100, engines=2))
    text = ServerMetrics("m", prices | {"drafter": 0.0}).render(engine, EngineStatus(True, 0, 0, 0)).decode()
    assert ('cospec:cost_per_hour{component="a",model_name="m"} 1.0' in text) == bool(prices)
    assert ("cospec:price_per_million_tokens{" in text) == bool(prices)
    assert 'component="drafter"' not in text


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
