"""A server under load: one run per request rate, with its arrivals, its values and its saturation."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import httpx

from cospec.bench.http_client import Endpoint, StreamClock, complete, probe
from cospec.bench.load_generator import Generator, LoadRecord
from cospec.bench.metrics import Selection
from cospec.bench.request_record import Params, Prompt, Timing
from cospec.bench.run_figures import by_load, detailed, figures
from cospec.bench.saturation_detector import detect
from cospec.bench.token_counter import TokenCounter
from cospec.errors import InvalidInput, words
from cospec.simulation.arrivals import Arrivals

WARM_UP = Prompt("warm-up", "Once upon a time")  # outside of all datasets, so that no prompt is cached


@dataclass(frozen=True, slots=True)
class RateRun:
    """One run of a sweep. Its prompts are new, because the server's prefix cache may hold earlier prompts.

    Attributes:
        max_concurrency: parallel requests; None for an open loop.
    """

    arrivals: Arrivals
    prompts: tuple[Prompt, ...]
    max_concurrency: int | None = None

    @property
    def label(self) -> str:
        """Description for reports."""
        limit = "" if self.max_concurrency is None else f", at most {self.max_concurrency} at a time"
        return self.arrivals.label + limit


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a benchmark.

    Attributes:
        warmups: uncounted requests before the first run, one after the other.
        seed: of the arrivals; the same in every run of a sweep.
    """

    stages: tuple[RateRun, ...]
    params: Params
    warmups: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ServeObserver:
    """Observes the runs: ``begin`` gets each run's label, ``done`` each ended request."""

    begin: Callable[[str], None] = lambda label: None
    done: Callable[[Timing], None] = lambda timing: None


async def record(
    endpoint: Endpoint, workload: Workload, watch: ServeObserver = ServeObserver()
) -> tuple[Endpoint, list[LoadRecord]]:
    """Record each stage; stages after an interrupted stage are omitted.

    Returns:
        Returns the endpoint with the server's model name, and the recordings.

    Raises:
        InvalidInput: no server answers at the URL, the warm-up fails, or a trace is too short.
    """
    times = [stage.arrivals.times(len(stage.prompts), workload.seed) for stage in workload.stages]
    found: list[LoadRecord] = []
    async with endpoint.connect() as http:
        endpoint = await probe(http, endpoint)
        await _warm_up(http, endpoint, workload)
        for stage, due in zip(workload.stages, times, strict=True):
            watch.begin(stage.label)
            generator = Generator(http, endpoint, stage.max_concurrency, watch.done)
            with _interruptible():
                found.append(await generator.run(stage.prompts, due, workload.params))
            if found[-1].interrupted is not None:
                break
    return endpoint, found


async def _warm_up(http: httpx.AsyncClient, endpoint: Endpoint, workload: Workload) -> None:
    for _ in range(workload.warmups):
        timing = await complete(http, endpoint, WARM_UP, workload.params, StreamClock())
        if not timing.ok:
            found = words(f"{endpoint.url}, which answered the first request with {timing.error_kind}: {timing.error}")
            raise InvalidInput("url", found, "a server that completes prompts")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the current run instead of the command, so that results are shown."""
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
    recording: LoadRecord, stage: RateRun, counter: TokenCounter, selection: Selection, keep_requests: bool = False
) -> dict[str, Any]:
    """Return the values of one recording of a stage, with its settings.

    Args:
        selection: without a price, tokens have the price of the machines that the server declares, on average.
    """
    timings = counter.count(recording.prompts, recording.timings)
    loads = recording.loads
    declared = [load.cost_per_hour for load in loads if load.cost_per_hour]  # none while the engine starts again
    if declared and not selection.cost_per_hour:
        selection = replace(selection, cost_per_hour=fmean(declared))
    counters = loads[-1].counters - loads[0].counters if len(loads) > 1 else None
    found = figures(timings, recording.duration, selection, counters)
    saturation = asdict(detect(timings))
    run = {
        "label": stage.label,
        "request_rate": stage.arrivals.rate,
        "burstiness": stage.arrivals.burstiness,
        "max_concurrency": stage.max_concurrency,
        "not_sent": recording.not_sent,
        "interrupted": recording.interrupted,
        "saturated": bool(saturation["reasons"]),
        "saturation": saturation,
        **found,
        "length_by_load": by_load(loads),
    }
    return run | (detailed(timings) if keep_requests else {})
