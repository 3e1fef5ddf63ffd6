"""Compares the simulator with the real engine on the same requests at the same times.

Run ``python -m benchmarks.fidelity``. The engine serves Poisson arrivals at each rate without drafts, with three tokens
and under ``auto``. Two sets of requests alternate, each twice, because the machine's speed changes within minutes. A
run is simulated with the level and pace of the run next to it, which served other requests. The shape of the latency
comes from all runs of its turn with other requests. The simulator also gets the arrivals, the lengths, and the output
tokens that the drafter would predict. No compared value is an input. The engine's difference between its two runs is
the limit of any simulator's accuracy.
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
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.common import DOMAINS, prompts, write
from benchmarks.load import CONFIGS, MEASURES, Job, poisson, serve
from cospec import LLM, SamplingParams
from cospec.core.stats import StepStats
from cospec.core.types import Commit
from cospec.models.model_folder import resolve
from cospec.policies.goodput.observed_steps import split_steps
from cospec.process_utils import freeze_gc
from cospec.profiling.fit_steps import MeasuredSteps, fit_steps, pace
from cospec.simulation.run import World, serve_all
from cospec.simulation.scenario import Scenario

VARIANTS: Mapping[str, dict[str, Any]] = {
    "off": {"policy": "off"},
    "k=3": {"num_speculative_tokens": 3},
    "auto": {},
}


def outputs_of(llm: LLM, jobs: Sequence[Job]) -> list[list[int]]:
    """Return the target's greedy output for every job."""
    params = [SamplingParams(temperature=0, max_tokens=job.tokens, ignore_eos=True) for job in jobs]
    found = llm.generate([list(job.prompt) for job in jobs], params)
    return [list(output.outputs[0].token_ids) for output in found]


@torch.no_grad()
def correct_guesses(drafter: Any, jobs: Sequence[Job], outputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return 1 if the drafter's likeliest token equals the output's token, else 0; one list per job."""
    rows = []
    for job, output in zip(jobs, outputs, strict=True):
        ids = torch.tensor([[*job.prompt, *output]])
        likeliest = drafter(input_ids=ids[:, :-1]).logits[0, len(job.prompt) - 1 :].argmax(-1)
        rows.append((likeliest == torch.tensor(output)).int().tolist())
    return rows


class StepRecorder:
    """Records the steps of an engine."""

    def __init__(self, llm: LLM) -> None:
        self._steps: list[MeasuredSteps] = []
        self._drafted: set[str] = set()
        self._policy = llm.engine.scheduler.policy
        self._observe = self._policy.observe
        patch.object(self._policy, "observe", self.observe).start()

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Record a step, and whether the drafter saw one of its texts for the first time."""
        ids = {commit.id for commit in commits if commit.drafted}
        fed = not ids <= self._drafted
        self._steps.extend(MeasuredSteps(each, fed) for each, _ in split_steps(stats, commits))
        self._drafted |= ids
        self._observe(stats, commits)

    def take(self) -> list[MeasuredSteps]:
        """Return the steps since the last call."""
        steps, self._steps = self._steps, []
        return steps


@dataclass(frozen=True)
class Run:
    """The result of serving: latencies in seconds, one per job, and steps."""

    latencies: Sequence[float]
    steps: Sequence[MeasuredSteps]

    def rest(self, jobs: Sequence[Job]) -> float:
        """Return the seconds per step outside of its total: a request waited and no step ran."""
        waited, until = 0.0, 0.0
        for job, latency in zip(jobs, self.latencies, strict=True):
            end = job.due + latency
            waited += max(0.0, end - max(until, job.due))
            until = max(until, end)
        return max(0.0, waited - sum(one.stats.total for one in self.steps)) / len(self.steps)


@dataclass
class Pair:
    """Latencies of the same requests, turn after turn; the engine's values are those of both runs."""

    measured: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    simulated: list[float] = field(default_factory=list)

    def row(self) -> dict[str, dict[str, float]]:
        """Return mean and p99 of both, the relative error, and the relative error of the engine's second run."""
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


@dataclass(frozen=True)
class Cell:
    """Two sets of requests at one rate, and their results.

    Attributes:
        sets: every set begins with a request at 0 s.
        correct: output tokens that the drafter would predict.
        runs: by configuration: first set, second set, first set, second set.
    """

    sets: Sequence[Sequence[Job]]
    correct: Sequence[Sequence[Sequence[int]]]
    runs: Mapping[str, Sequence[Run]]

    @classmethod
    def served(
        cls, llms: Mapping[str, LLM], recorders: Mapping[str, StepRecorder], drafter: Any, sets: Sequence[Sequence[Job]]
    ) -> Cell:
        """Serve the sets with each engine, four runs each."""
        correct = [correct_guesses(drafter, jobs, outputs_of(llms["off"], jobs)) for jobs in sets]
        for watch in recorders.values():
            watch.take()
        freeze_gc()  # as in a server's process, with the steps recorded so far
        runs = {
            name: [Run(serve(llm.engine, jobs, 0.0), recorders[name].take()) for jobs in (*sets, *sets)]
            for name, llm in llms.items()
        }
        return cls(sets, correct, runs)

    def simulated(self, name: str, place: int, steps: Sequence[MeasuredSteps]) -> list[float]:
        """Return the simulated latencies of a run, with level, pace and rest of the run next to it.

        Args:
            steps: of many runs with other requests, which determine the shape. A fit to single sequences does not know
                the time of two.
        """
        jobs, fitted = self.sets[place % 2], self.runs[name][place ^ 1]
        costs = fit_steps(steps, fitted.steps)
        target, draft = (cost.to_json() for cost in costs)
        scenario = Scenario.model_validate(
            {
                "requests": len(jobs),
                "kv_tokens": 200_000,
                "target": {"cost": target, "overhead": fitted.rest(self.sets[1 - place % 2])},
                "drafting": {"cost": draft},
                "domains": [{"trace": "guessed.jsonl", "prompt": {"mean": len(jobs[0].prompt)}}],
                "arrivals": {"kind": "trace", "trace": "arrivals.txt"},
                "pace": [{"seconds": seconds, "factor": factor} for seconds, factor in pace(fitted.steps, costs)],
                "variants": [{"name": name, **VARIANTS[name]}],
            }
        )
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            correct = map(json.dumps, self.correct[place % 2])
            (folder / "guessed.jsonl").write_text("\n".join(correct), encoding="utf-8")
            (folder / "arrivals.txt").write_text("\n".join(str(job.due) for job in jobs), encoding="utf-8")
            found, _ = serve_all(World(scenario, scenario.variants[0], folder), 1.0)
        return found.latencies


def compare(turn: Mapping[float, Cell], pairs: Mapping[tuple[float, str], Pair]) -> None:
    """Simulate every run of a turn, whose cells are by rate; shapes come from all runs with other requests."""
    for (rate, cell), place in product(turn.items(), range(4)):
        for name, runs in cell.runs.items():
            others = [
                one
                for other_rate, other in turn.items()
                for other_place, run in enumerate(other.runs[name])
                if other_rate != rate or other_place % 2 != place % 2
                for one in run.steps
            ]
            pair = pairs[rate, name]
            pair.simulated += cell.simulated(name, place, others)
            pair.measured[place // 2].extend(runs[place].latencies)


def main() -> None:
    """Measure, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[3, 5, 7, 9, 12])
    parser.add_argument("--requests", type=int, default=16, help="of one run")
    parser.add_argument("--turns", type=int, default=12, help="of four runs of every configuration at every rate")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of every prompt")
    parser.add_argument("--name", default="fidelity")
    options = parser.parse_args()
    llms = {name: LLM("zoo", CONFIGS[name], enable_prefix_caching=False) for name in VARIANTS}
    drafter = AutoModelForCausalLM.from_pretrained(resolve("zoo:drafter"), dtype=torch.float32).eval()
    listed = [llms["off"].encode(t) for group in zip(*(prompts(d, 100) for d in DOMAINS), strict=True) for t in group]
    texts = [ids[: options.prompt] for ids in listed if len(ids) >= options.prompt]
    for llm in llms.values():
        serve(llm.engine, poisson(8, 24, texts, options.tokens, 99), 0.0)
    recorders = {name: StepRecorder(llm) for name, llm in llms.items()}
    pairs: dict[tuple[float, str], Pair] = defaultdict(Pair)
    for number in range(options.turns):
        turn = {}
        for rate in options.rates:
            sets = [at_zero(poisson(rate, options.requests, texts, options.tokens, 2 * number + own)) for own in (0, 1)]
            turn[rate] = Cell.served(llms, recorders, drafter, sets)
        compare(turn, pairs)
        print(f"turn {number + 1} of {options.turns}", flush=True)
    rows: list[dict[str, Any]] = [{"rate": rate, "config": name, **pair.row()} for (rate, name), pair in pairs.items()]
    show(rows)
    errors = {key: {each: [abs(row[key][each]) for row in rows] for each in MEASURES} for key in ("error", "again")}
    worst = {key: {each: max(found) for each, found in kind.items()} for key, kind in errors.items()}
    middle = {key: {each: float(np.median(found)) for each, found in kind.items()} for key, kind in errors.items()}
    print("largest", worst, "median", middle)
    figures = {"options": vars(options), "rows": rows, "worst": worst, "median": middle}
    print("written to", write(options.name, figures))


def at_zero(jobs: Sequence[Job]) -> list[Job]:
    """Return the same requests, shifted so that the first is due at 0 s."""
    return [replace(job, due=job.due - jobs[0].due) for job in jobs]


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
