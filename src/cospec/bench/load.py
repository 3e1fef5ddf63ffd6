"""Drives a server: requests sent when they are due, at most so many at once, until all ended or the server is gone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from cospec.bench.client import UNREACHABLE, Endpoint, StreamClock, complete, read_load
from cospec.bench.counters import LoadSample
from cospec.bench.timing import Params, Prompt, Timing

OUTAGE = 3  # refused connections in a row after which nothing more is sent
SAMPLE_SECONDS = 1.0  # between looks at the server's own metrics

Done = Callable[[Timing], None]


@dataclass(frozen=True, slots=True)
class Recording:
    """What a run saw, whole or broken off.

    Attributes:
        timings: of every request that was sent and ended, in the order of ``prompts``.
        prompts: theirs.
        duration: seconds from the first arrival to the last end.
        loads: what the server said of itself, before, during and after; empty where it says nothing.
        not_sent: requests that were given up before they were sent, or while they ran.
        interrupted: why the run ended early, in words; None when it did not.
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
        max_concurrency: requests at once; None sends each when it is due.
        done: called with each timing as it ends.
    """

    def __init__(
        self, http: httpx.AsyncClient, endpoint: Endpoint, max_concurrency: int | None = None, done: Done | None = None
    ) -> None:
        self._http, self._endpoint, self._done = http, endpoint, done
        self._limit = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def run(self, prompts: Sequence[Prompt], times: Sequence[float], params: Params) -> Recording:
        """Send ``prompts[i]`` at ``times[i]`` seconds, ascending. Cancelling ends the run and keeps what was seen."""
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
        except asyncio.CancelledError:  # Ctrl-C: what was measured is kept
            interrupted = f"stopped by hand after {clock():.1f} s"
        if gone.is_set():
            lost = min(timing.end for timing in found.values() if timing.error_kind == UNREACHABLE)
            interrupted = f"the server stopped answering; connections were refused from {lost:.1f} s on"
        failure = work.exception() if work.done() else None
        await _finish(work, watch, sampler)
        if failure is not None:
            raise failure  # one of our own: what a server does is in the timings
        last = await read_load(self._http, clock()) if loads else None
        kept = sorted(found)
        return Recording(
            tuple(prompts[index] for index in kept),
            tuple(found[index] for index in kept),
            max((timing.end for timing in found.values()), default=0.0),
            (*loads, *([last] if last else [])),
            len(prompts) - len(kept),
            interrupted,
        )

    async def _sample(self, clock: StreamClock, loads: list[LoadSample]) -> None:
        """Look at the server's metrics now and then, for as long as it has any."""
        while (load := await read_load(self._http, clock())) is not None:
            loads.append(load)
            await asyncio.sleep(SAMPLE_SECONDS)


async def _finish(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
