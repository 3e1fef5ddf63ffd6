"""A server under load: one run per request rate, each with its arrivals, its figures and whether the server kept up."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from cospec.bench.arrivals import Arrivals
from cospec.bench.client import Clock, Endpoint, complete, probe
from cospec.bench.load import Generator, Recording
from cospec.bench.metrics import Selection
from cospec.bench.results import by_load, detailed, figures
from cospec.bench.saturation import detect
from cospec.bench.timing import Params, Prompt, Timing
from cospec.bench.tokens import TokenCounter
from cospec.errors import InvalidInput, words


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent.

    Attributes:
        max_concurrency: requests at once; None for an open loop.
        warmups: requests before the first run, one after the other, not counted.
        seed: of the arrivals; the same in every run of a sweep.
    """

    prompts: tuple[Prompt, ...]
    params: Params
    max_concurrency: int | None = None
    warmups: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Watch:
    """Who follows the runs: ``begin`` is told each one's label, ``done`` each request that ended."""

    begin: Callable[[str], None] = lambda label: None
    done: Callable[[Timing], None] = lambda timing: None


async def record(
    endpoint: Endpoint, workload: Workload, sweep: Seq[Arrivals], watch: Watch = Watch()
) -> tuple[Endpoint, list[Recording]]:
    """One recording per way of arriving; those after one that was interrupted are left out.

    Returns:
        The endpoint with the model's name as the server gave it, and the recordings.

    Raises:
        InvalidInput: nothing answers at the URL, or the warm-up fails, or a trace is too short.
    """
    times = [arrivals.times(len(workload.prompts), workload.seed) for arrivals in sweep]
    found: list[Recording] = []
    async with endpoint.connect() as http:
        endpoint = await probe(http, endpoint)
        await _warm_up(http, endpoint, workload)
        for arrivals, due in zip(sweep, times, strict=True):
            watch.begin(arrivals.label)
            generator = Generator(http, endpoint, workload.max_concurrency, watch.done)
            with _interruptible():
                found.append(await generator.run(workload.prompts, due, workload.params))
            if found[-1].interrupted is not None:
                break
    return endpoint, found


async def _warm_up(http: httpx.AsyncClient, endpoint: Endpoint, workload: Workload) -> None:
    for number in range(workload.warmups):
        prompt = workload.prompts[-1 - number % len(workload.prompts)]
        timing = await complete(http, endpoint, prompt, workload.params, Clock())
        if not timing.ok:
            found = words(f"{endpoint.url}, which answered the first request with {timing.error_kind}: {timing.error}")
            raise InvalidInput("url", found, "a server that completes prompts")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the run that is going on and not the command, so that what was measured is shown."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    try:
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    except (NotImplementedError, RuntimeError, ValueError):  # no signals on this platform, or not the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        while task.cancelling():
            task.uncancel()


def report(
    recording: Recording, arrivals: Arrivals, counter: TokenCounter, selection: Selection, keep_requests: bool = False
) -> dict[str, Any]:
    """The figures of one recording, with how it was made."""
    timings = counter.count(recording.prompts, recording.timings)
    loads = recording.loads
    counters = loads[-1].counters - loads[0].counters if len(loads) > 1 else None
    found = figures(timings, recording.duration, selection, counters)
    saturation = asdict(detect(timings))
    run = {
        "label": arrivals.label,
        "request_rate": getattr(arrivals, "rate", None),
        "burstiness": getattr(arrivals, "burstiness", None),
        "not_sent": recording.not_sent,
        "interrupted": recording.interrupted,
        "saturated": bool(saturation["reasons"]),
        "saturation": saturation,
        **found,
        "length_by_load": by_load(loads),
    }
    return run | (detailed(timings) if keep_requests else {})
