"""Does the simulator tell the truth: the real engine and its simulation, on the same requests at the same times.

Run ``python -m benchmarks.fidelity``. The engine serves Poisson arrivals at each rate without drafts, with three tokens
and under ``auto``. Two sets of requests take turns, each twice, since the machine's speed changes with the minutes: the
rounds of one run are what the simulation of the run next to it, with other requests, is fitted to. The simulator gets
that fit and its pace, the arrivals, the lengths, and which output tokens the drafter would have guessed. Nothing that
is compared is fed back. How far the engine is from itself, the second time, tells how near anything can come.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.common import DOMAINS, prompts, write
from benchmarks.load import CONFIGS, MEASURES, Job, poisson, serve
from cospec import LLM, SamplingParams
from cospec.lasting import keep
from cospec.models.folder import resolve
from cospec.policies.apart import apart
from cospec.profiling.rounds import Measured, fit_rounds, pace
from cospec.simulation.run import World, serve_all
from cospec.simulation.scenario import Scenario
from cospec.stats import RoundStats
from cospec.types import Commit

VARIANTS: Mapping[str, dict[str, Any]] = {
    "off": {"policy": "off"},
    "k=3": {"num_speculative_tokens": 3},
    "auto": {},
}


def outputs_of(llm: LLM, jobs: Sequence[Job]) -> list[list[int]]:
    """What the target writes for every job, greedy."""
    params = [SamplingParams(temperature=0, max_tokens=job.tokens, ignore_eos=True) for job in jobs]
    found = llm.generate([list(job.prompt) for job in jobs], params)
    return [list(output.outputs[0].token_ids) for output in found]


@torch.no_grad()
def guessed(drafter: Any, jobs: Sequence[Job], outputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """1 where the drafter's likeliest token, behind the words before it, is the output's own; one list per job."""
    rows = []
    for job, output in zip(jobs, outputs, strict=True):
        ids = torch.tensor([[*job.prompt, *output]])
        likeliest = drafter(input_ids=ids[:, :-1]).logits[0, len(job.prompt) - 1 :].argmax(-1)
        rows.append((likeliest == torch.tensor(output)).int().tolist())
    return rows


class Watch:
    """Notes the rounds of an engine."""

    def __init__(self, llm: LLM) -> None:
        self._rounds: list[Measured] = []
        self._drafted: set[str] = set()
        self._policy = llm.engine.scheduler.policy
        self._observe = self._policy.observe
        self._policy.observe = self.observe  # type: ignore[method-assign]

    def observe(self, stats: RoundStats, commits: Sequence[Commit]) -> None:
        """A round; whether the drafter saw one of its texts for the first time."""
        ids = {commit.id for commit in commits if commit.drafted}
        fed = not ids <= self._drafted
        self._rounds.extend(Measured(each, fed) for each, _ in apart(stats, commits))
        self._drafted |= ids
        self._observe(stats, commits)

    def take(self) -> list[Measured]:
        """The rounds since the last time."""
        rounds, self._rounds = self._rounds, []
        return rounds


@dataclass(frozen=True)
class Run:
    """What serving came to: latencies in seconds, one per job, and rounds."""

    latencies: Sequence[float]
    rounds: Sequence[Measured]

    def rest(self, jobs: Sequence[Job]) -> float:
        """Seconds of each round that is not in its total: those that somebody waited and no round ran."""
        waited, until = 0.0, 0.0
        for job, latency in zip(jobs, self.latencies, strict=True):
            end = job.due + latency
            waited += max(0.0, end - max(until, job.due))
            until = max(until, end)
        return max(0.0, waited - sum(one.stats.total for one in self.rounds)) / len(self.rounds)


@dataclass
class Pair:
    """Latencies of the same requests, turn after turn; the engine's are those of both times."""

    measured: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    simulated: list[float] = field(default_factory=list)

    def row(self) -> dict[str, dict[str, float]]:
        """Mean and p99 of both, the relative error, and that of the engine's second time beside its first."""
        first, second = self.measured
        found = {
            name: {"mean": float(np.mean(values)), "p99": float(np.quantile(values, 0.99))}
            for name, values in (
                ("measured", first + second),
                ("simulated", self.simulated),
                ("first", first),
                ("second", second),
            )
        }
        return {
            "measured": found["measured"],
            "simulated": found["simulated"],
            "error": {each: found["simulated"][each] / found["measured"][each] - 1 for each in MEASURES},
            "again": {each: found["second"][each] / found["first"][each] - 1 for each in MEASURES},
        }


def simulated(
    folder: Path, jobs: Sequence[Job], name: str, fitted: Run, others: Sequence[Run], rest: float
) -> list[float]:
    """Latencies of one variant by the simulator.

    Args:
        folder: holds the traces.
        fitted: another run of this variant.
        others: of all variants beside it, which show the shape of the costs.
        rest: seconds of each round that is not in its total.
    """
    costs = fit_rounds([one for run in others for one in run.rounds], fitted.rounds)
    target, draft = ({k: v for k, v in cost.to_json().items()} for cost in costs)
    scenario = Scenario.model_validate(
        {
            "requests": len(jobs),
            "kv_tokens": 200_000,
            "target": {"cost": target, "overhead": rest},
            "drafting": {"cost": draft},
            "domains": [{"trace": "guessed.jsonl", "prompt": {"mean": len(jobs[0].prompt)}}],
            "arrivals": {"kind": "trace", "trace": "arrivals.txt"},
            "pace": [{"seconds": seconds, "factor": factor} for seconds, factor in pace(fitted.rounds, costs)],
            "variants": [{"name": name, **VARIANTS[name]}],
        }
    )
    found, _ = serve_all(World(scenario, scenario.variants[0], folder), 1.0)
    return found.latencies


def main() -> None:
    """Measure, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[3, 5, 7, 9, 12])
    parser.add_argument("--requests", type=int, default=16, help="of one run")
    parser.add_argument("--turns", type=int, default=5, help="of four runs of every configuration at every rate")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of every prompt")
    parser.add_argument("--name", default="fidelity")
    options = parser.parse_args()
    llms = {name: LLM("zoo", CONFIGS[name], enable_prefix_caching=False) for name in VARIANTS}
    drafter = AutoModelForCausalLM.from_pretrained(resolve("zoo:drafter"), dtype=torch.float32).eval()
    listed = [llms["off"].encode(t) for trio in zip(*(prompts(d, 100) for d in DOMAINS), strict=True) for t in trio]
    texts = [ids[: options.prompt] for ids in listed if len(ids) >= options.prompt]
    for llm in llms.values():
        serve(llm.engine, poisson(8, 24, texts, options.tokens, 99), 0.0)
    watches = {name: Watch(llm) for name, llm in llms.items()}
    keep()  # as a server's processes do
    pairs: dict[tuple[float, str], Pair] = defaultdict(Pair)
    for turn in range(options.turns):
        for rate in options.rates:
            sets = [at_zero(poisson(rate, options.requests, texts, options.tokens, 2 * turn + own)) for own in (0, 1)]
            compare_turn(llms, watches, sets, drafter, {name: pairs[rate, name] for name in llms})
        print(f"turn {turn + 1} of {options.turns}", flush=True)
    rows = [{"rate": rate, "config": name, **pair.row()} for (rate, name), pair in pairs.items()]
    show(rows)
    errors = {key: {each: [abs(row[key][each]) for row in rows] for each in MEASURES} for key in ("error", "again")}
    worst = {key: {each: max(found) for each, found in kind.items()} for key, kind in errors.items()}
    middle = {key: {each: float(np.median(found)) for each, found in kind.items()} for key, kind in errors.items()}
    print("largest", worst, "median", middle)
    figures = {"options": vars(options), "rows": rows, "worst": worst, "median": middle}
    print("written to", write(options.name, figures))


def at_zero(jobs: Sequence[Job]) -> list[Job]:
    """The same requests, the first of them at once."""
    return [replace(job, due=job.due - jobs[0].due) for job in jobs]


def compare_turn(
    llms: Mapping[str, LLM],
    watches: Mapping[str, Watch],
    sets: Sequence[Sequence[Job]],
    drafter: Any,
    pairs: Mapping[str, Pair],
) -> None:
    """Serve both sets in turn, twice, and simulate each of the four runs by the one before or after it."""
    rights = [guessed(drafter, jobs, outputs_of(llms["off"], jobs)) for jobs in sets]
    for watch in watches.values():
        watch.take()
    runs: dict[str, list[Run]] = {
        name: [Run(serve(llm.engine, jobs, 0.0), watches[name].take()) for jobs in (*sets, *sets)]
        for name, llm in llms.items()
    }
    for place, (name, pair) in product(range(4), pairs.items()):
        own, next_to = place % 2, place ^ 1
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            (folder / "guessed.jsonl").write_text("\n".join(map(json.dumps, rights[own])), encoding="utf-8")
            (folder / "arrivals.txt").write_text("\n".join(str(job.due) for job in sets[own]), encoding="utf-8")
            fitted, others = runs[name][next_to], [each[next_to] for each in runs.values()]
            rest = fitted.rest(sets[1 - own])
            pair.simulated += simulated(folder, sets[own], name, fitted, others, rest)
            pair.measured[place // 2].extend(runs[name][place].latencies)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each rate and configuration."""
    table = Table(
        "requests/s",
        "config",
        *(head for each in MEASURES for head in (f"{each} ms: measured", "simulated", "error", "engine again")),
    )
    for row in rows:
        cells = []
        for each in MEASURES:
            cells += [
                f"{1e3 * row['measured'][each]:.0f}",
                f"{1e3 * row['simulated'][each]:.0f}",
                f"{row['error'][each]:+.1%}",
                f"{row['again'][each]:+.1%}",
            ]
        table.add_row(f"{row['rate']:g}", row["config"], *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
