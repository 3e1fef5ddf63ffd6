"""Systems alternate over the same work; ratios are of the same turn."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import pytest

from cospec.bench.compare import Comparison, ComparisonPlan, compare, report
from cospec.bench.latency import Batches, Bench
from cospec.bench.metrics import Selection
from cospec.bench.request_record import Params, Prompt
from cospec.bench.run_figures import against_first
from cospec.bench.systems import SYSTEMS, SystemSpec, as_json
from cospec.bench.token_counter import TokenCounter
from cospec.errors import InvalidInput
from harness.methods import override
from unit.bench.fakes import FakeSystem

PROMPTS = [Prompt(f"p{i}", "abc", "code" if i % 2 else "math") for i in range(4)]
PARAMS = Params(max_tokens=8)


def run(schedule: ComparisonPlan, **fakes: FakeSystem) -> Comparison:
    return compare(list(fakes.values()), PROMPTS, PARAMS, schedule, TokenCounter(None))


def pair(log: list[str], fails: tuple[int, ...] = ()) -> dict[str, FakeSystem]:
    # The machine slows down from turn to turn; the second system always takes half as long.
    moods = [1.0, *(1.0 + 0.5 * turn for turn in range(40))]
    return {
        "slow": FakeSystem("slow", iter(moods), log),
        "fast": FakeSystem("fast", iter([mood / 2 for mood in moods]), log, fails),
    }


def test_every_system_runs_every_piece_in_every_turn_after_a_warm_up() -> None:
    log: list[str] = []
    found = run(ComparisonPlan(batch=2, repetitions=3, warmups=1), **pair(log))
    assert log[:4] == ["start slow", "start fast", "slow", "fast"] and log[-2:] == ["stop fast", "stop slow"]
    turns = [tuple(log[i : i + 2]) for i in range(4, len(log) - 2, 2)]
    assert len(turns) == 6 and all(set(turn) == {"slow", "fast"} for turn in turns)
    assert len(set(turns)) == 2, "the order changes from turn to turn"
    assert [(one.piece, one.repetition) for one in found.of("fast")] == [(p, r) for r in range(3) for p in range(2)]


def test_the_seed_decides_the_order() -> None:
    logs: list[list[str]] = [[], [], []]
    for log, seed in zip(logs, (1, 1, 2), strict=True):
        run(ComparisonPlan(repetitions=4, seed=seed), **pair(log))
    assert logs[0] == logs[1] != logs[2]


def test_ratios_do_not_see_the_machines_mood() -> None:
    found = run(ComparisonPlan(repetitions=2), **pair([]))
    for cost in ("time_per_token", "ttft", "tpot", "e2el"):
        ratio = found.ratio("fast", "slow", cost)
        assert ratio is not None and ratio.pairs == 8
        assert ratio.value == pytest.approx(2.0) and ratio.high - ratio.low < 1e-9


def test_turns_with_a_failure_are_left_out_and_counted() -> None:
    found = run(ComparisonPlan(repetitions=2), **pair([], fails=(3, 5)))
    ratio = found.ratio("fast", "slow", "time_per_token")
    assert ratio is not None and ratio.pairs == 6
    figures = report(found, Selection())
    assert figures["runs"][1]["failed"] == 2 and figures["runs"][1]["error_kinds"] == {"engine": 2}


def test_the_report_has_a_run_per_system_and_a_ratio_per_cost() -> None:
    figures = report(run(ComparisonPlan(repetitions=2), **pair([])), Selection())
    slow, fast = figures["runs"]
    assert fast["output_throughput"] == pytest.approx(2 * slow["output_throughput"])
    assert fast["same_text"] == 1.0 and "same_text" not in slow
    assert set(fast["by_category"]) == {"code", "math"}
    assert fast["speculation"]["acceptance_per_position"] == [1.0, 1.0], "warm-ups are not counted"
    assert {row["cost"] for row in figures["ratios"]} == {"time_per_token", "ttft", "tpot", "e2el"}


def test_tokens_have_the_price_of_each_systems_machines() -> None:
    """A price of the command line counts for all systems; without any price there is none."""
    systems = pair([])
    systems["fast"].price = 6.0
    found = run(ComparisonPlan(), **systems)

    def prices(given: float) -> list[float | None]:
        return [one.get("price_per_million_tokens") for one in report(found, Selection(cost_per_hour=given))["runs"]]

    slow, fast = prices(0.0)
    assert slow is None and fast is not None
    dear, twice = prices(12.0)
    assert dear is not None and twice is not None
    assert twice == pytest.approx(2 * fast) and dear == pytest.approx(2 * twice)


def test_two_systems_at_one_server_keep_their_counters_apart() -> None:
    server = FakeSystem("server", repeat(1.0), [])
    again = FakeSystem("again", repeat(1.0), [])
    override(again, run=server.run, counters=server.counters)
    found = run(ComparisonPlan(repetitions=2), server=server, again=again)
    for name in ("server", "again"):
        counters = found.counters(name)
        assert counters is not None and counters.drafts == 8 and counters.target_calls == 8


def test_systems_are_compared_with_all_before_and_with_the_first() -> None:
    fakes = {name: FakeSystem(name, repeat(seconds), []) for name, seconds in (("a", 4.0), ("b", 2.0), ("c", 1.0))}
    figures = report(run(ComparisonPlan(repetitions=2), **fakes), Selection())
    found = {
        (row["system"], row["baseline"]): row["ratio"] for row in figures["ratios"] if row["cost"] == "time_per_token"
    }
    assert found == pytest.approx({("b", "a"): 2.0, ("c", "a"): 4.0, ("c", "b"): 2.0})
    assert {row["system"] for row in against_first(figures)} == {"b", "c"}
    assert all(row["baseline"] == "a" for row in against_first(figures))


def test_the_key_to_a_server_is_not_stored() -> None:
    spec = SystemSpec.parse('a={"system": "url", "url": "http://host:1", "api_key": "secret"}', "zoo")
    assert "secret" not in as_json(spec)


def test_systems_are_stopped_when_one_breaks() -> None:
    log: list[str] = []
    broken = FakeSystem("broken", iter([1.0]), log)  # it has no time for a second run
    with pytest.raises(StopIteration):
        run(ComparisonPlan(), whole=FakeSystem("whole", repeat(1.0), log), broken=broken)
    assert log[-2:] == ["stop broken", "stop whole"]


def test_batches_of_a_fixed_size() -> None:
    log: list[str] = []
    done: list[None] = []
    system = FakeSystem("one", chain([9.0], repeat(0.5)), log)
    bench = Bench(system, PARAMS, TokenCounter(None), lambda: done.append(None))
    batches = Batches(size=1, iterations=3, warmups=1)
    found = bench.run(batches, PROMPTS, Selection())
    assert batches.prompts == 4 == len(done) and found["batch"] == 1
    assert found["seconds"] == [0.5] * 3 and found["completed"] == 3
    assert found["output_throughput"] == pytest.approx(3 * 8 / 1.5)


def test_a_system_is_named_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "ngram.json"
    path.write_text('{"speculative_config": {"method": "ngram"}, "model": "zoo:drafter"}')
    ours = SystemSpec.parse('off={"speculative_config": {"method": "off"}}', "zoo")
    assert (ours.name, ours.kind, ours.options["model"]) == ("off", "cospec", "zoo")
    assert SystemSpec.parse(f"ngram={path}", "zoo").options["model"] == "zoo:drafter"
    assert SystemSpec.parse("pipeinfer=examples/baselines/pipeinfer.yaml", "zoo").options["pipeline_parallel_size"] == 3
    assert SystemSpec.parse("http://host:1/v1", "zoo").kind == "url"
    assert SystemSpec.parse("theirs=http://host:1", "zoo").options == {"model": "zoo", "url": "http://host:1"}
    assert SystemSpec.parse("plain=cospec", "zoo").options == {"model": "zoo"}


@pytest.mark.parametrize(
    "text", ["nothing", "a=", "a=none.json", "a=README.md", 'a={"system": "other"}', "a={broken", "=x"]
)
def test_a_system_that_is_none_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(InvalidInput, match="allowed is"):
        SystemSpec.parse(text, "zoo")


@pytest.mark.parametrize("kind", sorted(SYSTEMS))
def test_every_kind_refuses_options_that_it_does_not_know(kind: str) -> None:
    needed = {"url": "http://host:1"} if kind == "url" else {}
    with pytest.raises(InvalidInput, match="unheard_of"):
        SystemSpec("x", kind, {"model": "zoo", **needed, "unheard_of": 1}).build()
