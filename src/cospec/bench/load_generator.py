"""Drives a server: sends requests when due, bounded in number, until all end or the server is gone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from cospec.bench.counters import LoadSample
from cospec.bench.http_client import UNREACHABLE, Endpoint, StreamClock, complete, read_load
from cospec.bench.request_record import Params, Prompt, Timing

OUTAGE = 3  # consecutive refused connections after which the run stops
SAMPLE_SECONDS = 1.0  # between reads of the server's metrics

Done = Callable[[Timing], None]


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """The result of a run, complete or interrupted.

    Attributes:
        timings: of every sent and ended request, in the order of ``prompts``.
        prompts: the prompts of ``timings``.
        duration: seconds from the first arrival to the last end.
        loads: the server's load before, during and after the run; empty if not reported.
        not_sent: requests that were dropped before or after sending.
        interrupted: why the run ended early, in words; None for a complete run.
    """

    prompts: tuple[Prompt, ...]
    timings: tuple[Timing, ...]
    duration: float
    loads: tuple[LoadSample, ...] = ()
    not_sent: int = 0
    interrupted: str | None = None


class Generator:
    """Sends prompts to one endpoint.

    Args:
        max_concurrency: parallel requests; None sends each request when due.
        done: called with each timing at its end.
    """

    def __init__(
        self, http: httpx.AsyncClient, endpoint: Endpoint, max_concurrency: int | None = None, done: Done | None = None
    ) -> None:
        self._http, self._endpoint, self._done = http, endpoint, done
        self._limit = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def run(self, prompts: Sequence[Prompt], times: Sequence[float], params: Params) -> LoadRecord:
        """Send ``prompts[i]`` at ``times[i]`` seconds, ascending. A cancelled run keeps its results."""
        clock, found = StreamClock(), dict[int, Timing]()
        refused = deque[bool](maxlen=OUTAGE)
        gone = asyncio.Event()
        interrupted: str | None = None

        async def one(index: int) -> None:
            await asyncio.sleep(max(0.0, times[index] - clock()))
            if self._limit is None:
                await send(index)
            else:
                async with self._limit:
                    await send(index)

        async def send(index: int) -> None:
            if gone.is_set():
                return
            found[index] = timing = await complete(
                self._http, self._endpoint, prompts[index], params, clock, times[index]
            )
            refused.append(timing.error_kind == UNREACHABLE)
            if len(refused) == OUTAGE and all(refused):
                gone.set()
            if self._done is not None:
                self._done(timing)

        loads: list[LoadSample] = []
        sampler = asyncio.create_task(self._sample(clock, loads))
        work: asyncio.Future[Any] = asyncio.gather(*(one(index) for index in range(len(prompts))))
        watch: asyncio.Future[Any] = asyncio.create_task(gone.wait())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # Ctrl-C keeps the measured results
            interrupted = f"interrupted by the user after {clock():.1f} s"
        if gone.is_set():
            lost = min(timing.end for timing in found.values() if timing.error_kind == UNREACHABLE)
            interrupted = f"the server stopped answering; connections were refused from {lost:.1f} s on"
        failure = work.exception() if work.done() else None
        await _finish(work, watch, sampler)
        if failure is not None:
            raise failure  # an internal error: errors of a server are in the timings
        last = await read_load(self._http, clock()) if loads else None
        kept = sorted(found)
        return LoadRecord(
            tuple(prompts[index] for index in kept),
            tuple(found[index] for index in kept),
            max((timing.end for timing in found.values()), default=0.0),
            (*loads, *([last] if last else [])),
            len(prompts) - len(kept),
            interrupted,
        )

    async def _sample(self, clock: StreamClock, loads: list[LoadSample]) -> None:
        """Read the server's metrics regularly, as long as the server has any."""
        while (load := await read_load(self._http, clock())) is not None:
            loads.append(load)
            await asyncio.sleep(SAMPLE_SECONDS)


async def _finish(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
