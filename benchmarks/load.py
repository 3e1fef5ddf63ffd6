"""Measures latency by request rate under load: ``auto`` against off and fixed lengths.

Run ``python -m benchmarks.load``. Requests of three domains arrive at Poisson times. At every rate all configurations
serve the same requests at the same times. The configurations alternate in short turns, in a new order each turn, so
that a slow minute of the machine affects all. Each configuration has a warm engine of its own. Latency counts from the
due time, as a user sees it, so queues count. Ratios compare the same requests. The best of several noisy figures is too
good, so ``auto`` is also compared with the best configuration of the *other* turns.

Where an engine's memory lies changes its speed as long as the engine exists. So all engines share their weights,
``--restarts`` loads them again in a new order, and intervals resample the restarts before the turns. ``control`` is the
ratio of two engines without speculation, which shows what the benchmark cannot tell apart.
``parts`` are requests, tokens and milliseconds of a step, which say why a configuration is slower: its drafts, or its
steps. ``paired`` is the median over turns of the ratio of mean latencies in one turn, with an interval. Every engine
serves ``WARM`` requests first. The benchmark also draws SmartSpec's figure 11.

``--instruction-set`` forces the kernels of an older processor; the names of results have processor and instruction set.
``--disturb`` starts a second process that occupies a core at times and stops this process at times.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from queue import SimpleQueue
from select import select
from threading import Thread
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, ROOT, machine, prompts, write
from cospec import LLM, SamplingParams
from cospec.core.engine import Engine
from cospec.core.stats import RequestStats
from cospec.process_utils import freeze_gc
from cospec.text.input_processor import make_requests

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "auto": {"method": "draft_model", "model": "zoo:drafter", "num_speculative_tokens": "auto"},
    "off": {"method": "off"},
    **{f"k={k}": {"method": "draft_model", "model": "zoo:drafter", "num_speculative_tokens": k} for k in (1, 3, 5)},
}
CONTROL = "off again"
ENGINES: Mapping[str, Mapping[str, Any]] = {**CONFIGS, CONTROL: CONFIGS["off"]}
MEASURES: Mapping[str, Callable[[Any], Any]] = {"mean": np.mean, "p99": lambda x: np.quantile(x, 0.99)}
COUNTED = ("steps", "generation_tokens", "step_seconds", "draft_seconds", "target_seconds")
WARM = 20  # requests that every engine serves before the measurement
DISTURBANCE = """
import os, random, signal, sys, time
engine = int(sys.argv[1])
while os.getppid() == engine:
    time.sleep(random.uniform(0.5, 2.0))
    if random.random() < 0.5:
        end = time.monotonic() + random.uniform(0.1, 0.4)
        while time.monotonic() < end:
            pass
    else:
        os.kill(engine, signal.SIGSTOP)
        time.sleep(random.uniform(0.02, 0.1))
        os.kill(engine, signal.SIGCONT)
"""
_numbers = count()


@dataclass(frozen=True)
class Job:
    """One request: its due time in seconds from the start, its prompt and its length."""

    due: float
    prompt: tuple[int, ...]
    tokens: int


def poisson(rate: float, number: int, texts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[Job]:
    """Draw ``number`` requests at ``rate`` per second: domains in turn, lengths from 0.5 to 1.5 times ``tokens``."""
    draw = np.random.default_rng((seed, int(rate * 1000)))
    due = np.cumsum(draw.exponential(1 / rate, number))
    lengths = draw.integers(tokens // 2, tokens * 3 // 2 + 1, number)
    start = int(draw.integers(len(texts)))
    jobs = zip(due, lengths, strict=True)
    return [Job(float(at), tuple(texts[(start + i) % len(texts)]), int(n)) for i, (at, n) in enumerate(jobs)]


class RequestFeeder:
    """Submits jobs at their due times, independent of the engine, and wakes the engine as a server does."""

    def __init__(self, jobs: Sequence[Job], started: float) -> None:
        self._jobs, self._started = jobs, started
        self._arrived: SimpleQueue[Job] = SimpleQueue()
        self.wakeup_fd = os.eventfd(0)
        self._thread = Thread(target=self._call, daemon=True)

    def __enter__(self) -> RequestFeeder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        os.close(self.wakeup_fd)

    def take(self, wait: bool) -> list[Job]:
        """Return the jobs since the last call; with ``wait`` block until a job arrives."""
        if select([self.wakeup_fd], [], [], None if wait else 0.0)[0]:
            os.eventfd_read(self.wakeup_fd)
        return [self._arrived.get() for _ in range(self._arrived.qsize())]

    def _call(self) -> None:
        for job in self._jobs:
            time.sleep(max(0.0, self._started + job.due - time.monotonic()))
            self._arrived.put(job)
            os.eventfd_write(self.wakeup_fd, 1)


@dataclass(frozen=True)
class Served:
    """A job that ended."""

    latency: float  # seconds from the due time to the last token
    tokens: tuple[int, ...]
    stats: RequestStats


def serve(engine: Engine, jobs: Sequence[Job], temperature: float) -> list[float]:
    """Return the latency of every job in seconds, from its due time to its last token."""
    return [each.latency for each in served(engine, jobs, temperature)]


def served(engine: Engine, jobs: Sequence[Job], temperature: float) -> list[Served]:
    """Serve all jobs, each from its due time."""
    ends: dict[str, tuple[float, RequestStats]] = {}
    texts: dict[str, tuple[int, ...]] = {}
    ids: list[str] = []
    started = time.monotonic()
    with RequestFeeder(jobs, started) as feeder:
        engine.set_wakeup_fd(feeder.wakeup_fd)
        while len(ends) < len(jobs):
            arrived = feeder.take(wait=False)
            if not arrived and not engine.has_work:
                engine.on_idle()  # as in a server's engine
                arrived = feeder.take(wait=True)
            for job in arrived:
                params = SamplingParams(temperature=temperature, max_tokens=job.tokens, ignore_eos=True)
                (request,) = make_requests(f"load-{next(_numbers)}", job.prompt, params, arrival=started + job.due)
                ids.append(request.id)
                engine.add(request)
            for event in engine.step():
                texts[event.id] = texts.get(event.id, ()) + event.tokens
                if event.stats is not None:
                    ends[event.id] = time.monotonic() - started, event.stats
        engine.set_wakeup_fd(-1)
    return [Served(ends[id][0] - job.due, texts[id], ends[id][1]) for id, job in zip(ids, jobs, strict=True)]


def counts(engine: Engine) -> Counter[str]:
    """Return what an engine has done so far: steps, their requests, tokens and seconds."""
    metrics = asdict(engine.metrics())
    found = Counter({name: metrics[name] for name in COUNTED})
    found["requests"] = metrics["native_requests"] + sum(metrics["python_path_requests"].values())
    return found


def parts(spent: Mapping[str, float]) -> dict[str, float]:
    """Return requests and tokens of a step, and its milliseconds: in all, for drafting, and for the target."""
    found = {f"{name}_per_step": spent[name] / spent["steps"] for name in ("requests", "generation_tokens")}
    return found | {
        f"{name}_ms": 1e3 * spent[f"{name}_seconds"] / spent["steps"] for name in ("step", "draft", "target")
    }


Turns = Mapping[str, Sequence[Sequence[float]]]
"""Latencies by configuration and turn; equal indices are the same request."""


def figures(turns: Turns) -> dict[str, dict[str, float]]:
    """Return mean and p99 by configuration, in seconds."""
    return {
        name: {each: float(measure(np.concatenate(found))) for each, measure in MEASURES.items()}
        for name, found in turns.items()
        if name in CONFIGS
    }


def resampled(turns: int, restarts: int, generator: np.random.Generator) -> list[int]:
    """Draw as many turns again: restarts first, then turns of each. A restart has consecutive turns."""
    size = turns // restarts
    starts = size * generator.integers(0, restarts, restarts)
    return [int(start + place) for start in starts for place in generator.integers(0, size, size)]


def ratio(
    ours: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]], statistic: str, restarts: int
) -> dict[str, float]:
    """Return a configuration's ratio to another, with a 95% interval from resampled restarts, turns and requests."""
    pair = [[np.array(turn) for turn in each] for each in (ours, baseline)]
    generator, found = np.random.default_rng(0), []
    for _ in range(1000):
        chosen = resampled(len(ours), restarts, generator)
        places = [generator.integers(0, len(ours[turn]), len(ours[turn])) for turn in chosen]
        one, two = (np.concatenate([x[t][at] for t, at in zip(chosen, places, strict=True)]) for x in pair)
        found.append(MEASURES[statistic](one) / MEASURES[statistic](two))
    low, high = np.quantile(found, [0.025, 0.975])
    our_value, their_value = (float(MEASURES[statistic](np.concatenate(x))) for x in pair)
    return {"ratio": our_value / their_value, "low": float(low), "high": float(high)}


def best(turns: Turns, statistic: str, among: Sequence[int]) -> str:
    """Return the configuration other than ``auto`` that was best in some of the turns."""
    values = {
        name: float(MEASURES[statistic](np.concatenate([found[turn] for turn in among])))
        for name, found in turns.items()
        if name not in ("auto", CONTROL)
    }
    return min(values, key=lambda name: values[name])


def against_best(turns: Turns, statistic: str, restarts: int) -> dict[str, float | str]:
    """Return ``auto`` over the best of the others, see ``ratio``.

    The best of four is lucky, so equal systems give a ratio above 1.
    """
    name = best(turns, statistic, range(len(turns["auto"])))
    return {"best": name, **ratio(turns["auto"], turns[name], statistic, restarts)}


def against_chosen(turns: Turns, statistic: str, restarts: int) -> dict[str, float]:
    """Return ``auto`` over an operator's choice: in each turn the configuration that was best in all other turns."""
    every = range(len(turns["auto"]))
    chosen = [best(turns, statistic, [other for other in every if other != turn]) for turn in every]
    return ratio(turns["auto"], [turns[name][turn] for turn, name in enumerate(chosen)], statistic, restarts)


def paired(turns: Turns, restarts: int) -> dict[str, float | str]:
    """Return the median over turns of ``auto``'s mean latency over the best other, with a 95% interval."""
    name = best(turns, "mean", range(len(turns["auto"])))
    ratios = np.array([np.mean(one) / np.mean(two) for one, two in zip(turns["auto"], turns[name], strict=True)])
    generator = np.random.default_rng(0)
    drawn = [np.median(ratios[resampled(len(ratios), restarts, generator)]) for _ in range(2000)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"best": name, "ratio": float(np.median(ratios)), "low": float(low), "high": float(high)}


@contextmanager
def disturbed(wanted: bool) -> Iterator[None]:
    """Run a second process in the block that slows and stops this process at times."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", DISTURBANCE, str(os.getpid())])
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def place(name: str) -> str:
    """Return the name of a result file, with processor, instruction set and number of threads."""
    about = machine()
    return re.sub(r"[^\w.-]+", "-", f"{name}_{about['processor']}_{about['kernels']}").strip("-").lower()


def plot(rows: Sequence[Mapping[str, Any]], name: str) -> None:
    """Plot the speedup over no speculation by rate, as in SmartSpec's figure 11."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for axis, statistic in zip(axes, ("mean", "p99"), strict=True):
        for config in CONFIGS:
            speedups = [row["latency"]["off"][statistic] / row["latency"][config][statistic] for row in rows]
            axis.plot(
                [row["rate"] for row in rows], speedups, marker="o", lw=2.5 if config == "auto" else 1, label=config
            )
        axis.set_xscale("log")
        axis.set_xlabel("requests per second")
        axis.set_ylabel(f"speedup of {statistic} latency over off")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "images" / f"{name}.png", dpi=110)


Prompts = Sequence[Sequence[int]]


@contextmanager
def loaded(
    names: Sequence[str], how: Mapping[str, Any], options: argparse.Namespace
) -> Iterator[tuple[Mapping[str, Engine], Prompts]]:
    """Load an engine of each configuration, in the order of ``names``, and serve some requests with each."""
    with ExitStack() as stack:
        llms = {name: stack.enter_context(LLM("zoo", ENGINES[name], **how)) for name in names}
        groups = zip(*(prompts(domain, 60) for domain in DOMAINS), strict=True)
        texts = [llms["off"].encode(text)[:96] for group in groups for text in group]
        for llm in llms.values():
            serve(llm.engine, poisson(8, WARM, texts, options.tokens, 99), options.temperature)
        freeze_gc()  # as in a server's process
        yield {name: llm.engine for name, llm in llms.items()}, texts
    gc.unfreeze()
    gc.collect()  # the next engines shall not wait for the memory of these


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, 6, 8, 12, 16, 24, 32])
    parser.add_argument("--seconds", type=float, default=2.5, help="of arrivals in one turn")
    parser.add_argument("--fewest", type=int, default=5, help="requests in one turn")
    parser.add_argument("--turns", type=int, default=2, help="of every configuration at every rate, after each restart")
    parser.add_argument("--restarts", type=int, default=3, help="how often all engines are loaded again")
    parser.add_argument("--tokens", type=int, default=64, help="mean length of an output")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--instruction-set", default="auto", help="of the CPU kernels: auto, base, avx2, avx512, ...")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of the weights")
    parser.add_argument("--disturb", action="store_true", help="slow and stop the engines now and then")
    parser.add_argument("--name", default="load")
    options = parser.parse_args()
    how = {"enable_prefix_caching": False, "instruction_set": options.instruction_set, "dtype": options.dtype}
    shuffler = random.Random(0)
    found: dict[float, dict[str, list[list[float]]]] = {rate: {name: [] for name in ENGINES} for rate in options.rates}
    spent: dict[tuple[float, str], Counter[str]] = defaultdict(Counter)
    with disturbed(options.disturb):
        for restart in range(options.restarts):
            with loaded(shuffler.sample(list(ENGINES), len(ENGINES)), how, options) as (engines, texts):
                for turn in range(restart * options.turns, (restart + 1) * options.turns):
                    for rate, turns in found.items():
                        number = max(options.fewest, int(rate * options.seconds))
                        jobs = poisson(rate, number, texts, options.tokens, turn)
                        for name in shuffler.sample(list(ENGINES), len(ENGINES)):
                            spent[rate, name].subtract(counts(engines[name]))
                            turns[name].append(serve(engines[name], jobs, options.temperature))
                            spent[rate, name].update(counts(engines[name]))
                    print(f"turn {turn + 1} of {options.restarts * options.turns}", flush=True)
    rows = [
        {**row_of(rate, turns, options.restarts), "parts": {name: parts(spent[rate, name]) for name in CONFIGS}}
        for rate, turns in found.items()
    ]
    show(rows)
    results = {"options": vars(options), "rows": rows}
    print("written to", write(place(options.name), results))
    if options.instruction_set == "auto" and options.dtype == "auto" and not options.disturb:
        write(options.name, results)  # results for the pages
        plot(rows, options.name)


def row_of(rate: float, turns: Turns, restarts: int) -> dict[str, Any]:
    """Return all figures of one rate."""
    return {
        "rate": rate,
        "requests": sum(map(len, turns["auto"])),
        "latency": figures(turns),
        "auto_over_best": {statistic: against_best(turns, statistic, restarts) for statistic in MEASURES},
        "auto_over_chosen": {statistic: against_chosen(turns, statistic, restarts) for statistic in MEASURES},
        "paired": paired(turns, restarts),
        "auto_over_off": {statistic: ratio(turns["auto"], turns["off"], statistic, restarts) for statistic in MEASURES},
        "control": {statistic: ratio(turns[CONTROL], turns["off"], statistic, restarts) for statistic in MEASURES},
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each rate."""
    heads = (
        *("auto / best: mean", "p99", "auto / chosen: mean", "p99", "auto / off: mean", "p99", "control: mean", "p99"),
        "auto / best: mean of turns",
    )
    table = Table("requests/s", *(f"{name} mean / p99 ms" for name in CONFIGS), *heads)
    for row in rows:
        cells = [f"{1e3 * f['mean']:.0f} / {1e3 * f['p99']:.0f}" for f in row["latency"].values()]
        ratios = [
            f"{r['ratio']:.2f} ({r['low']:.2f}-{r['high']:.2f}) {r.get('best', '')}"
            for key in ("auto_over_best", "auto_over_chosen", "auto_over_off", "control")
            for r in row[key].values()
        ]
        pairs = row["paired"]
        ratios.append(f"{pairs['ratio']:.2f} ({pairs['low']:.2f}-{pairs['high']:.2f}) {pairs['best']}")
        table.add_row(f"{row['rate']:g}", *cells, *ratios)
    Console(width=300).print(table)


if __name__ == "__main__":
    main()
