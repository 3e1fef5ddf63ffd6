"""The client against a server that stamps what it sends, and against one that dies."""

from __future__ import annotations

import asyncio
import socket

import pytest

from cospec.bench.http_client import Endpoint
from cospec.bench.load_generator import LoadRecord
from cospec.bench.metrics import Selection, latency
from cospec.bench.request_record import Params, Prompt, Timing
from cospec.bench.serve import RateRun, ServeObserver, Workload, record, report
from cospec.bench.token_counter import TokenCounter
from cospec.errors import InvalidInput
from cospec.simulation.arrivals import AtOnce, by_rate
from unit.bench.stub_server import Script, StubServer

STREAM: Script = ((0.05, "a"), (0.04, "bcde"), (0.03, "fgh"), (0.04, "i"))
PAGE = """# TYPE cospec:spec_decode_num_drafts counter
cospec:spec_decode_num_drafts_total{drafter="d",model_name="m"} 10.0
cospec:spec_decode_num_draft_tokens_total{drafter="d",model_name="m"} 40.0
cospec:spec_decode_num_accepted_tokens_total{drafter="d",model_name="m"} 25.0
"""
PRICES = {"target": 4.0, "node:a": 0.5}


def drive(server: StubServer, prompts: list[str], concurrency: int | None = None, warmups: int = 0) -> LoadRecord:
    stage = RateRun(AtOnce(), tuple(Prompt(f"r{i}", text) for i, text in enumerate(prompts)), concurrency)
    workload = Workload((stage,), Params(max_tokens=9), warmups)
    _, (found,) = asyncio.run(record(Endpoint(server.url), workload))
    return found


def test_the_clients_times_enclose_the_servers_stamps() -> None:
    with StubServer({"p": STREAM}) as server:
        found = drive(server, ["p"])
        stamps = server.stamps["p"][0]
    (timing,) = TokenCounter(None).count(found.prompts, found.timings)
    assert timing.ok and timing.text == "abcdefghi" and timing.output_tokens == 9
    assert [chunk.tokens for chunk in timing.chunks] == [1, 4, 3, 1] and timing.finish_reason == "length"
    one = latency(timing)
    assert one is not None and one.ttft is not None and one.tpot is not None
    # The client sends before the server reads and reads after the server sends: this holds on any machine.
    assert one.ttft >= stamps.sent[0] - stamps.received
    assert one.e2el >= stamps.sent[-1] - stamps.received
    # How late it reads depends on the machine; five seconds are a machine that stands still.
    assert abs(one.ttft - (stamps.sent[0] - stamps.received)) < 5
    assert abs(one.tpot * 8 - (stamps.sent[-1] - stamps.sent[0])) < 5
    assert len(one.itl) == 8 and sum(one.itl) == pytest.approx(one.e2el - one.ttft)


def test_a_request_carries_what_was_asked_for() -> None:
    with StubServer({"p": STREAM}) as server:
        drive(server, ["p"])
        (body,) = server.bodies
    asked = {"model": "stub", "max_tokens": 9, "temperature": 0.0, "stream": True, "ignore_eos": True}
    assert asked.items() <= body.items() and "include_speculation_stats" not in body


def test_requests_ask_for_counters_and_the_metrics_page_is_read() -> None:
    with StubServer({"p": STREAM}, metrics=PAGE) as server:
        found = drive(server, ["p"])
        assert server.bodies[0]["include_speculation_stats"] is True
    assert len(found.loads) >= 2
    counters = found.loads[0].counters
    assert counters.length == 4.0 and counters.mean_acceptance_length == 3.5


@pytest.mark.parametrize(("given", "price_per_hour"), [(0.0, 4.5), (9.0, 9.0)])
def test_tokens_have_the_price_that_the_server_declares(given: float, price_per_hour: float) -> None:
    """The option comes first."""
    declared = "".join(f'cospec:cost_per_hour{{component="{name}"}} {cost}\n' for name, cost in PRICES.items())
    stage = RateRun(AtOnce(), (Prompt("r", "p"),))
    with StubServer({"p": STREAM}, metrics=PAGE + "# TYPE cospec:cost_per_hour gauge\n" + declared) as server:
        _, (found,) = asyncio.run(record(Endpoint(server.url), Workload((stage,), Params(max_tokens=9), 0)))
    run = report(found, stage, TokenCounter(None), Selection(cost_per_hour=given))
    hours = found.duration / 3600
    assert run["price_per_million_tokens"] == pytest.approx(price_per_hour * hours * 1e6 / 9)


def test_concurrency_is_kept() -> None:
    with StubServer({"p": STREAM}) as server:
        found = drive(server, ["p"] * 5, concurrency=2)
    points = [(t.sent, 1) for t in found.timings] + [(t.end, -1) for t in found.timings]
    running, most = 0, 0
    for _, change in sorted(points):
        running += change
        most = max(most, running)
    assert most <= 2 and len(found.timings) == 5


def test_refused_requests_are_counted_by_kind() -> None:
    with StubServer({"p": STREAM}) as server:
        found = drive(server, ["p", "unknown", "p"])
    run = report(found, RateRun(AtOnce(), ()), TokenCounter(None), Selection())
    assert run["completed"] == 2 and run["failed"] == 1 and run["error_kinds"] == {"HTTP 400": 1}
    assert run["interrupted"] is None and run["not_sent"] == 0


def test_a_dead_server_is_reported_and_measurements_are_kept() -> None:
    with StubServer({"p": STREAM}, die_after=3) as server:
        found = drive(server, ["p"] * 12, concurrency=1)
    run = report(found, RateRun(AtOnce(), ()), TokenCounter(None), Selection(), keep_requests=True)
    assert run["completed"] == 3 and run["total_output_tokens"] == 27 and run["mean_ttft_ms"] > 0
    assert run["error_kinds"]["connection lost"] == 1 and run["error_kinds"]["no connection"] == 3
    assert run["not_sent"] == 12 - 3 - 4 and "stopped answering" in run["interrupted"]
    assert run["generated_texts"][3] == "a"  # what came before the end


def test_a_sweep_ends_with_the_server() -> None:
    begun: list[str] = []
    seen: list[Timing] = []
    with StubServer({"p": STREAM}, die_after=1) as server:
        stages = tuple(RateRun(by_rate(rate), (Prompt("r", "p"),) * 8, 1) for rate in (50.0, 100.0))
        watch = ServeObserver(begun.append, seen.append)
        _, found = asyncio.run(record(Endpoint(server.url), Workload(stages, Params(), 0), watch))
    assert (
        len(found) == 1
        and begun == ["50 requests/s, Poisson, at most 1 at a time"]
        and len(seen) == len(found[0].timings)
    )


def test_cancelling_keeps_what_was_measured() -> None:
    slow: Script = ((0.01, "a"), (30.0, "b"))

    async def main(url: str) -> LoadRecord:
        first = asyncio.Event()
        stage = RateRun(AtOnce(), (Prompt("r", "p"), Prompt("s", "slow")))
        workload = Workload((stage,), Params(), 0)
        watch = ServeObserver(done=lambda timing: first.set())
        task = asyncio.create_task(record(Endpoint(url), workload, watch))
        await first.wait()
        task.cancel()
        _, (found,) = await task
        return found

    with StubServer({"p": STREAM, "slow": slow}) as server:
        found = asyncio.run(main(server.url))
    assert [timing.id for timing in found.timings] == ["r"] and found.not_sent == 1
    assert found.interrupted is not None and "by the user" in found.interrupted


def test_where_nothing_answers_there_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InvalidInput, match="server that answers"):
            asyncio.run(record(Endpoint(url), Workload((RateRun(AtOnce(), (Prompt("r", "p"),)),), Params())))


def test_a_failing_warm_up_says_what_the_server_said() -> None:
    with StubServer({}) as server, pytest.raises(InvalidInput, match="HTTP 400"):
        drive(server, ["p"], warmups=1)
