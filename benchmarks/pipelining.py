"""Measures overlapped drafting: every execution mode and executor on this machine, and the pipeline in the simulator.

Run ``python -m benchmarks.pipelining``, which takes less than five minutes on two cores. Each variant is an engine in
its own process. All variants generate from the same texts in turn, and ratios compare variants within one turn. The
pipeline divides the requests into two target batches. Minions' target keeps its batch (section 3.4), so one variant has
twice the requests.

Overlap efficiency is the busy seconds of drafter and target over the elapsed seconds. 1 is alternation without a gap; 2
would be two machines without waits. On shared cores overlapping stages slow each other down, so their busy seconds grow
without more throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, ROOT, Samples, prompts, write
from cospec import SamplingParams
from cospec.config import EngineConfig
from cospec.models.loading import load_tokenizer, resolve
from cospec.runtime.async_engine import AsyncEngineClient
from cospec.simulation.run import simulate
from cospec.simulation.scenario import DrafterConfig, LatencyConfig, Scenario, ScenarioVariant
from cospec.text.input_processor import make_requests

TURNS, PIPELINED = "sequential", "pipelined, thread"
DOUBLED = f"{PIPELINED}, twice the requests"
OWN = {"drafter_executor": "process", "drafter_cores": [1]}
WAYS: dict[str, dict[str, Any]] = {
    TURNS: {"execution_mode": "sequential"},
    PIPELINED: {"execution_mode": "pipelined", "drafter_executor": "thread"},
    "draft-ahead, thread": {"execution_mode": "draft-ahead", "drafter_executor": "thread"},
    "pipelined, process": {"execution_mode": "pipelined", "drafter_executor": "process"},
    "draft-ahead, process": {"execution_mode": "draft-ahead", "drafter_executor": "process"},
    "pipelined, a core each": {"execution_mode": "pipelined", **OWN},
    "draft-ahead, a core each": {"execution_mode": "draft-ahead", **OWN},
    "auto, process": {"execution_mode": "auto", "drafter_executor": "process"},
}
RATIOS = (0.25, 0.5, 1.0)  # time of drafting over time of verification; Minions does not print its own
SCENARIO = ROOT / "examples" / "scenarios" / "minions-fig12.yaml"
LENGTH, BATCH = 4, 16  # of the simulated drafts and target batches
REQUESTS = 256  # number of simulated requests; with few requests the end without overlap would be too large a part


@dataclass(frozen=True, slots=True)
class RunTimes:
    """One batch, from its first request to its last token."""

    seconds: float
    tokens: int
    draft: float
    target: float
    info: Mapping[str, str]

    @property
    def overlap(self) -> float:
        """Overlap efficiency."""
        return (self.draft + self.target) / self.seconds


async def write_batch(client: AsyncEngineClient, texts: Sequence[Sequence[int]], params: SamplingParams) -> RunTimes:
    """Generate a batch with an engine."""
    before, started = await client.metrics(), time.perf_counter()
    requests = [one for n, text in enumerate(texts) for one in make_requests(f"{started}-{n}", text, params)]
    tokens = 0
    async for event in client.submit(requests):
        tokens += len(event.tokens)
    seconds, after = time.perf_counter() - started, await client.metrics()
    draft, target = (after[name] - before[name] for name in ("draft_seconds", "target_seconds"))
    return RunTimes(seconds, tokens, draft, target, after["execution_mode_info"])


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all variants in turn, for each batch."""
    clients = {name: AsyncEngineClient() for name in given.ways}
    speculative = {"method": "draft_model", "num_speculative_tokens": given.length}
    shared = {"model": "zoo", "kv_cache_memory_bytes": 128 << 20, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    tokenizer, shuffler, found = load_tokenizer(resolve("zoo")), random.Random(0), {}
    try:
        for name, client in clients.items():
            await client.start(EngineConfig.build({**shared, "speculative_config": {**speculative, **WAYS[name]}}))
        for batch in given.batches:
            per = -(-batch // len(DOMAINS))
            texts = [tokenizer.encode(text) for domain in DOMAINS for text in prompts(domain, per)][:batch]
            jobs = {name: (client, texts) for name, client in clients.items()}
            if PIPELINED in clients:
                jobs[DOUBLED] = clients[PIPELINED], [*texts, *texts]
            order, rows = list(jobs), {name: list[RunTimes]() for name in jobs}
            for turn in range(given.repeats + 1):
                shuffler.shuffle(order)
                for name in order:
                    run_times = await write_batch(*jobs[name], params)
                    if turn:  # the first turn is a warm-up
                        rows[name].append(run_times)
            found[str(batch)] = {name: _figures(rows, name) for name in rows}
    finally:
        await asyncio.gather(*(client.close() for client in clients.values()))
    return found


def _figures(rows: Mapping[str, Sequence[RunTimes]], name: str) -> dict[str, Any]:
    """Return a variant's medians, and its speed over sequential execution by paired ratios."""
    own = rows[name]
    samples = Samples({each: [run_times.seconds / run_times.tokens for run_times in rows[each]] for each in rows})
    ratio, low, high = samples.ratio(TURNS, name)
    return {
        "tokens_per_second": median(run_times.tokens / run_times.seconds for run_times in own),
        "speed": ratio,
        "speed_interval": [low, high],
        "overlap": median(run_times.overlap for run_times in own),
        "draft_share": median(run_times.draft / (run_times.draft + run_times.target) for run_times in own),
        "at_work": dict(own[-1].info),
    }


def simulated() -> dict[str, Any]:
    """Simulate the pipeline with separate hardware for drafters, by the ratio of the stages' times."""
    scenario = Scenario.read(SCENARIO)
    cost = scenario.target.cost.built(SCENARIO.parent)
    context = BATCH * sum(length.mean for length in (scenario.domains[0].prompt, scenario.domains[0].output)) / 2
    verify = cost.seconds(context, BATCH * (LENGTH + 1), BATCH)
    variants = []
    for ratio in RATIOS:
        drafting = DrafterConfig(cost=LatencyConfig(fixed=ratio * verify / LENGTH, slopes=(0.0,)))
        for execution_mode, seqs in (("sequential", BATCH), ("pipelined", 2 * BATCH)):
            more: dict[str, Any] = {
                "num_speculative_tokens": LENGTH,
                "execution_mode": execution_mode,
                "drafting": drafting,
                "max_num_seqs": seqs,
            }
            variants.append(ScenarioVariant(name=f"{ratio:g}, {execution_mode}", **more))
    runs = simulate(scenario.model_copy(update={"variants": tuple(variants), "requests": REQUESTS}), SCENARIO.parent)[
        "runs"
    ]
    speed = {run["variant"]: run["throughput"] for run in runs}
    return {
        f"{ratio:g}": {
            "speed": speed[f"{ratio:g}, pipelined"] / speed[f"{ratio:g}, sequential"],
            "overlap": next(run["overlap"] for run in runs if run["variant"] == f"{ratio:g}, pipelined"),
        }
        for ratio in RATIOS
    }


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Print the tables."""
    here = Table(
        "batch", "execution_mode, drafting", "tokens/s", "speed over turns", "95%", "overlap", "at work", box=None
    )
    for batch, rows in found["batches"].items():
        for name, row in rows.items():
            low, high = row["speed_interval"]
            info = f"{row['at_work']['execution_mode']}: {row['at_work']['reason']}"
            figures = (f"{row['tokens_per_second']:.0f}", f"{row['speed']:.2f}", f"{low:.2f} to {high:.2f}")
            here.add_row(batch, name, *figures, f"{row['overlap']:.2f}", info)
    there = Table("simulated", "drafting / verification", "speed over turns", "overlap", box=None)
    for name, row in found["simulated"].items():
        there.add_row(name, f"{row['speed']:.2f}", f"{row['overlap']:.2f}")
    return [here, there]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, simulate, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    given = parser.parse_args(arguments)
    if TURNS not in given.ways:
        parser.error(f"{TURNS!r} is the baseline of the comparison")
    found = {"batches": asyncio.run(measure(given)), "simulated": simulated()}
    for table in tables(found):
        Console().print(table)
    write("pipelining", found)
    return found


if __name__ == "__main__":
    main()
