"""Does speculation ever slow a loaded engine down: latency by request rate, ``auto`` against off and fixed lengths.

Run ``python -m benchmarks.load``. Requests of three domains come at Poisson times. At every rate each configuration
serves the same requests at the same times, one configuration after the other in a new order, each in an engine of its
own that stays warm. Latency counts from when a request was due, as a user sees it, so a queue shows. Beside the figures
it writes the plot of SmartSpec's figure 11 for these models.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, ROOT, prompts, write
from cospec import LLM, SamplingParams
from cospec.engine.engine import Engine
from cospec.engine.requests import make_requests

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "auto": {"method": "draft_model", "model": "zoo:drafter", "num_speculative_tokens": "auto"},
    "off": {"method": "off"},
    **{f"k={k}": {"method": "draft_model", "model": "zoo:drafter", "num_speculative_tokens": k} for k in (1, 3, 5)},
}
_numbers = count()


@dataclass(frozen=True)
class Job:
    """One request: when it is due, in seconds from the start, and what it asks."""

    due: float
    prompt: tuple[int, ...]
    tokens: int


def poisson(rate: float, number: int, texts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[Job]:
    """``number`` requests at ``rate`` per second, domains by turns, half to one and a half times ``tokens`` long."""
    draw = np.random.default_rng((seed, int(rate * 1000)))
    due = np.cumsum(draw.exponential(1 / rate, number))
    lengths = draw.integers(tokens // 2, tokens * 3 // 2 + 1, number)
    start = int(draw.integers(len(texts)))
    jobs = zip(due, lengths, strict=True)
    return [Job(float(at), tuple(texts[(start + i) % len(texts)]), int(n)) for i, (at, n) in enumerate(jobs)]


def serve(engine: Engine, jobs: Sequence[Job], temperature: float) -> list[float]:
    """Latency of every job in seconds, from when it was due to its last token."""
    ends: dict[str, float] = {}
    ids: list[str] = []
    started, waiting = time.monotonic(), list(jobs)[::-1]
    while waiting or engine.has_work:
        now = time.monotonic() - started
        while waiting and waiting[-1].due <= now:
            job = waiting.pop()
            params = SamplingParams(temperature=temperature, max_tokens=job.tokens, ignore_eos=True)
            (request,) = make_requests(f"load-{next(_numbers)}", job.prompt, params, arrival=started + job.due)
            ids.append(request.id)
            engine.add(request)
        if not engine.has_work:
            time.sleep(max(0.0, waiting[-1].due - (time.monotonic() - started)))
            continue
        for event in engine.step():
            if event.finish is not None:
                ends[event.id] = time.monotonic() - started
    return [ends[id] - job.due for id, job in zip(ids, jobs, strict=True)]


def figures(latencies: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Mean and p99 by configuration, in seconds."""
    return {
        name: {"mean": float(np.mean(values)), "p99": float(np.quantile(values, 0.99))}
        for name, values in latencies.items()
    }


def against_best(latencies: Mapping[str, Sequence[float]], statistic: str, seed: int = 0) -> dict[str, float | str]:
    """``auto`` over the best of the others, with a 95% interval from resampling the requests in pairs."""
    measure = {"mean": lambda x: x.mean(-1), "p99": lambda x: np.quantile(x, 0.99, axis=-1)}[statistic]
    arrays = {name: np.array(values) for name, values in latencies.items()}
    others = {name: float(measure(values)) for name, values in arrays.items() if name != "auto"}
    best = min(others, key=lambda name: others[name])
    draws = np.random.default_rng(seed).integers(0, len(arrays["auto"]), (1000, len(arrays["auto"])))
    ratios = measure(arrays["auto"][draws]) / measure(arrays[best][draws])
    low, high = np.quantile(ratios, [0.025, 0.975])
    value = float(measure(arrays["auto"])) / others[best]
    return {"best": best, "ratio": value, "low": float(low), "high": float(high)}


def plot(rows: Sequence[Mapping[str, Any]], name: str) -> None:
    """Speedup over no speculation by rate, as in SmartSpec's figure 11."""
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
    figure.savefig(ROOT / "benchmarks" / "results" / f"{name}.png", dpi=110)


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, 8, 16, 24, 32, 40, 56])
    parser.add_argument("--seconds", type=float, default=6.0, help="of arrivals in one run")
    parser.add_argument("--fewest", type=int, default=24, help="requests in one run")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="mean length of an output")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--name", default="load")
    options = parser.parse_args()
    llms = {name: LLM("zoo", config, enable_prefix_caching=False) for name, config in CONFIGS.items()}
    any_llm = llms["off"]
    texts = [
        any_llm.encode(text)[:96] for trio in zip(*(prompts(d, 60) for d in DOMAINS), strict=True) for text in trio
    ]
    for llm in llms.values():
        serve(llm.engine, poisson(8, 24, texts, options.tokens, 99), options.temperature)  # warm, and learnt a little
    shuffler, rows = random.Random(0), []
    for rate in options.rates:
        latencies: dict[str, list[float]] = {name: [] for name in CONFIGS}
        for repeat in range(options.repeats):
            jobs = poisson(rate, max(options.fewest, int(rate * options.seconds)), texts, options.tokens, repeat)
            for name in shuffler.sample(list(CONFIGS), len(CONFIGS)):
                latencies[name] += serve(llms[name].engine, jobs, options.temperature)
        row = {
            "rate": rate,
            "requests": len(latencies["auto"]),
            "latency": figures(latencies),
            "auto_over_best": {statistic: against_best(latencies, statistic) for statistic in ("mean", "p99")},
        }
        rows.append(row)
        print(f"{rate:g} requests/s:", {name: round(f["mean"], 4) for name, f in row["latency"].items()}, flush=True)
    table = Table("requests/s", *(f"{name} mean / p99 ms" for name in CONFIGS), "auto / best: mean", "p99")
    for row in rows:
        cells = [f"{1e3 * f['mean']:.0f} / {1e3 * f['p99']:.0f}" for f in row["latency"].values()]
        ratios = [
            f"{r['ratio']:.2f} ({r['low']:.2f}-{r['high']:.2f}) {r['best']}" for r in row["auto_over_best"].values()
        ]
        table.add_row(f"{row['rate']:g}", *cells, *ratios)
    Console(width=200).print(table)
    print("written to", write(options.name, {"options": vars(options), "rows": rows}))
    plot(rows, options.name)


if __name__ == "__main__":
    main()
