"""The counters of the engine agree with what its outputs say."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
import pytest

from cospec import LLM
from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.types import SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.metrics.engine_counters import EngineMetrics, merge
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.toys import make_request, run_all, toy_engine, with_pool


@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block"])
def test_they_add_up(acceptance_method: str) -> None:
    drafter = ModelDrafter(ToyModel(5, seed=2), "small")
    engine = toy_engine(with_pool(ToyModel(5, seed=1), 16, 4), drafter, acceptance_method, 3, max_num_batched_tokens=16)
    requests = [
        make_request(
            f"r{n}",
            (0, 1, 2, 3, 4, n),
            SamplingParams(max_tokens=14, seed=n),
            speculation=SpeculationParams(acceptance_method=acceptance_method),
        )
        for n in range(5)
    ]
    events = run_all(engine, requests)
    metrics = engine.metrics()
    last = [own[-1].stats for own in events.values()]
    stats = [each for each in last if each is not None]
    assert len(stats) == 5
    assert metrics.generation_tokens == sum(len(event.tokens) for own in events.values() for event in own) == 70
    assert metrics.prompt_tokens == metrics.prefix_cache_queries == 30
    assert metrics.prefix_cache_hits == sum(each.cached_prompt_tokens for each in stats)
    assert metrics.drafts == {"small": sum(each.drafts for each in stats)}
    assert metrics.draft_tokens == {"small": sum(each.drafted for each in stats)}
    assert metrics.accepted_tokens == {"small": sum(each.accepted for each in stats)}
    assert sum(metrics.accepted_per_pos["small"]) == metrics.accepted_tokens["small"]
    assert metrics.accepted_per_pos["small"] == sorted(metrics.accepted_per_pos["small"], reverse=True)
    assert metrics.requests_finished == {"length": 5}
    assert metrics.num_preemptions == sum(each.preemptions for each in stats) > 0
    assert metrics.target_calls == metrics.steps >= max(each.target_calls for each in stats)
    assert (metrics.requests_running, metrics.requests_waiting, metrics.kv_cache_usage) == (0, 0, 0)
    assert metrics.step_seconds >= metrics.draft_seconds + metrics.target_seconds > 0
    sources = [source for own in events.values() for event in own for source in event.sources]
    assert sources.count("small") == metrics.accepted_tokens["small"]
    for own, each in zip(events.values(), stats, strict=True):
        assert each.accepted + each.rejections + sum(s == "bonus" for e in own for s in e.sources) <= 14
        assert each.ttft is not None
        assert each.e2e is not None
        assert each.e2e >= each.ttft
    repeated = run_all(engine, [make_request("again", (0, 1, 2, 3, 4, 9 % 5), SamplingParams(max_tokens=2))])
    assert repeated["again"][-1].stats is not None
    assert repeated["again"][-1].stats.cached_prompt_tokens == 4


def test_each_reason_is_counted_per_step_and_logged_once_per_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = toy_engine(ToyModel(5, seed=1), None, native="off")
    with caplog.at_level("DEBUG", logger="cospec.core.engine"):
        run_all(engine, [make_request(f"r{n}", (0, n), SamplingParams(max_tokens=5)) for n in range(2)])
    metrics = engine.metrics()
    assert (metrics.native_requests, metrics.python_path_requests) == (0, {"native off": 10})
    assert [record.getMessage() for record in caplog.records] == [
        "request r0 uses the Python path: native off",
        "request r1 uses the Python path: native off",
    ]
    run_all(plain := toy_engine(ToyModel(5, seed=1), None), [make_request("r", (0,), SamplingParams(max_tokens=3))])
    assert set(plain.metrics().python_path_requests) <= {"the target has no native forward", "the library is not built"}


def test_the_present_load() -> None:
    engine = toy_engine(ToyModel(5, seed=1), None, max_num_seqs=2)
    for n in range(3):
        engine.add(make_request(f"r{n}", (0, n), SamplingParams(max_tokens=5)))
    assert engine.metrics().requests_waiting == 3
    engine.step()
    metrics = engine.metrics()
    assert (metrics.requests_running, metrics.requests_waiting) == (2, 1)
    assert metrics.kv_cache_usage > 0
    engine.abort(["r0", "r2"])
    assert engine.metrics().requests_finished == {"abort": 2}


def test_they_can_be_sent_whatever_the_policy_has_learned() -> None:
    """Numbers of the policy's arithmetic stay within the engine's process: its encoder knows plain ones only."""
    llm = LLM("zoo", enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    while llm.engine.metrics().steps < 200:  # costs are learned every 32, and predictions made with them later
        llm.generate(["It was a dark night, and", "def add(", "Question: Tom has 3 apples"], params)
    metrics = llm.engine.metrics()
    assert msgspec.msgpack.encode(asdict(metrics))
    assert {type(value) for value in metrics.policy.values()} == {float}


def test_reading_metrics_teaches_no_policy_but_idle_time_does() -> None:
    config = SpeculativeConfig(acceptance_method="match")
    parts = assemble(ToyModel(5, seed=1), ModelDrafter(ToyModel(5, seed=2)), config, EngineConfig(), TextInfo())
    engine = Engine(parts, EngineConfig())
    run_all(engine, [make_request("r", (0, 1), SamplingParams(max_tokens=12, seed=1))])
    assert sum(engine.metrics().draft_tokens.values()) > 0
    before = engine.metrics().policy
    assert engine.metrics().policy == before
    engine.on_idle()
    assert engine.metrics().policy["acceptance_rate"] != before["acceptance_rate"]


def test_counters_are_sums_and_levels_are_means() -> None:
    first = EngineMetrics(
        requests_running=2,
        kv_cache_usage=0.5,
        drafts={"a": 3},
        accepted_per_pos={"a": [2, 1]},
        requests_finished={"stop": 1},
        execution_mode_info={"mode": "sequential"},
        policy={"speculation_length": 4.0},
        nodes=[{"node": "a"}],
    )
    second = EngineMetrics(
        requests_running=1,
        kv_cache_usage=0.1,
        drafts={"a": 1, "b": 5},
        accepted_per_pos={"a": [1, 1, 1]},
        requests_finished={"length": 2},
        execution_mode_info={"mode": "sequential"},
        policy={"speculation_length": 2.0},
    )
    joined = merge([asdict(first), asdict(second)])
    assert joined["requests_running"] == 3
    assert joined["kv_cache_usage"] == 0.3
    assert joined["drafts"] == {"a": 4, "b": 5}
    assert joined["accepted_per_pos"] == {"a": [3, 2, 1]}
    assert joined["requests_finished"] == {"stop": 1, "length": 2}
    assert joined["execution_mode_info"] == {"mode": "sequential"}
    assert joined["policy"] == {"speculation_length": 3.0}
    assert joined["nodes"] == [{"node": "a"}]
    assert joined["engines"] == 2
    assert merge([asdict(first)]) == asdict(first)
