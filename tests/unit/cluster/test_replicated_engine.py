"""Requests over replicas that are lost: what goes on, what ends, and what is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cospec.cluster import replicated_engine
from cospec.cluster.replica import StreamItem, Unavailable
from cospec.cluster.replica_reports import ReplicaReport, ReplicaReports
from cospec.cluster.replicated_engine import MAX_LOST_REPLICAS, ReplicaLost, ReplicatedEngine
from cospec.core.types import Event, FinishReason, Request
from cospec.errors import EngineStopped
from cospec.runtime.codec import Codec
from cospec.runtime.engine_client import RequestRefused
from cospec.runtime.messages import EngineInfo, Events, Failed, Rejected
from cospec.sampling_params import SamplingParams
from cospec.server.metrics import ServerMetrics
from cospec.text.input_processor import make_requests

INFO = EngineInfo("m", "m", 512, 1000)
LENGTH = 6
FAILURES = ("engine_up", "engine_restarts", "replicas_lost", "stage_host_restarts")


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated_engine, "MAX_DELAY", 0.01)


class Counting:
    """Replicas that write the numbers after the prompt; some are lost after some tokens.

    Args:
        losses: after how many tokens the first, second ... stream breaks; -1: the engine of that replica restarts.
    """

    def __init__(self, losses: Sequence[int] = (), ending: StreamItem | None = None) -> None:
        self._losses, self._ending = list(losses), ending
        self.prefixes: list[tuple[bytes, ...]] = []
        self._requests, self._items = Codec(Request), Codec(StreamItem)
        self.ids: list[str] = []
        self.cancelled = 0

    async def generate(
        self, request: list[bytes], prefix: tuple[bytes, ...], age: float
    ) -> AsyncGenerator[list[bytes], None]:
        found: Request = self._requests.decode(request)
        self.ids.append(found.id)
        self.prefixes.append(prefix)
        loss = self._losses.pop(0) if self._losses else LENGTH + 1
        if loss < 0:
            yield [bytes(part) for part in self._items.encode(Unavailable("The engine restarts."))]
            return
        try:
            known = len(found.resumed_output or ())
            for number in range(known, LENGTH):
                if number - known == loss:
                    raise ReplicaLost("A replica is lost.")
                await asyncio.sleep(0)
                if self._ending is not None:
                    yield [bytes(part) for part in self._items.encode(self._ending)]
                    return
                finish = FinishReason.LENGTH if number == LENGTH - 1 else None
                event = Event(found.id, found.parent, found.index, f"{number} ", (number,), ("target",), finish=finish)
                yield [bytes(part) for part in self._items.encode(Events((event,)))]
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise

    async def metrics(self) -> list[dict[str, Any]]:
        return []


def request(**given: Any) -> Request:
    (made,) = make_requests("r-0", tuple(range(40)), SamplingParams(max_tokens=LENGTH, **given))
    return made


def run(replicas: Counting, use: Callable[[ReplicatedEngine], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(use(ReplicatedEngine(replicas, INFO, ReplicaReports(patience=60))), 20)

    return asyncio.run(main())


async def collect(engine: ReplicatedEngine, made: Request) -> list[int]:
    events = [event async for event in engine.submit([made])]
    assert all(event.id == made.id for event in events)
    return [token for event in events for token in event.tokens]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("losses", [(), (0,), (2,), (3, 0, 1)])
def test_requests_go_on_however_often_a_replica_is_lost(losses: tuple[int, ...], temperature: float) -> None:
    replicas = Counting(losses)

    async def use(engine: ReplicatedEngine) -> None:
        assert await collect(engine, request(temperature=temperature)) == list(range(LENGTH))
        assert engine.status.replayed == len(losses)
        assert engine.status.live == 0

    run(replicas, use)
    assert len(set(replicas.ids)) == 1 + len(losses)  # a slow replica never sees an id twice


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_request_waits_while_engines_restart(temperature: float) -> None:
    replicas = Counting([-1] * (MAX_LOST_REPLICAS + 1))

    async def use(engine: ReplicatedEngine) -> None:
        assert await collect(engine, request(temperature=temperature)) == list(range(LENGTH))
        assert engine.status.replayed == 0

    run(replicas, use)
    assert replicas.prefixes[0]
    assert not any(replicas.prefixes[1:])  # the replica that has the prefix may be the replica that restarts


def test_a_request_that_loses_every_replica_ends() -> None:
    async def use(engine: ReplicatedEngine) -> None:
        with pytest.raises(EngineStopped):
            await collect(engine, request(temperature=0))

    replicas = Counting([0] * 100)
    run(replicas, use)
    assert len(replicas.ids) == MAX_LOST_REPLICAS


@pytest.mark.parametrize(
    ("ending", "error"),
    [(Rejected("r-0", "too long", "prompt"), RequestRefused), (Failed("The engine has died."), EngineStopped)],
    ids=["refused", "engine"],
)
def test_errors_of_the_engine_are_not_replayed(ending: StreamItem, error: type[Exception]) -> None:
    replicas = Counting(ending=ending)

    async def use(engine: ReplicatedEngine) -> None:
        with pytest.raises(error):
            await collect(engine, request(temperature=0))

    run(replicas, use)
    assert len(replicas.ids) == 1


def test_abort_cancels_the_stream_of_the_replica() -> None:
    replicas = Counting()

    async def use(engine: ReplicatedEngine) -> None:
        made = request(temperature=0)
        events = [event async for event in stop_after_one(engine, made)]
        assert events[-1].finish is FinishReason.ABORT
        assert engine.status.live == 0
        await asyncio.sleep(0.01)

    async def stop_after_one(engine: ReplicatedEngine, made: Request) -> AsyncGenerator[Event, None]:
        async for event in engine.submit([made]):
            engine.abort([made.id])
            yield event

    run(replicas, use)
    assert replicas.cancelled == 1


def test_metrics_have_the_failures_of_replicas_and_change_nothing() -> None:
    reports = ReplicaReports(patience=60)
    engine, metrics = ReplicatedEngine(Counting(), INFO, reports), ServerMetrics("m")

    def shown() -> list[float]:
        families = text_string_to_metric_families(metrics.render(None, engine.status).decode())
        found = {family.name: family.samples[0].value for family in families if family.samples}
        return [found[f"cospec:{name}"] for name in FAILURES]

    assert shown() == [1, 0, 0, 0]
    reports.note(ReplicaReport("a", False, 2, 1))
    assert shown() == shown() == [0, 2, 0, 1]
    reports.note(ReplicaReport("b", True, 1))
    reports.keep({"b"})
    assert shown() == shown() == [1, 3, 1, 1]
