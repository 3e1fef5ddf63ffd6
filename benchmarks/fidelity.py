"""Does the simulator tell the truth: the real engine and its simulation, on the same requests at the same times.

Run ``python -m benchmarks.fidelity``. The engine serves Poisson arrivals at each rate without drafts, with three tokens
and under ``auto``. Turns are short and come in pairs, since the machine's speed changes with the minutes: in one the
rounds are measured that the time models are fitted to, in the next, with other requests, what is compared. The
simulator gets that fit, the arrivals, the lengths, and which output tokens the drafter would have guessed. Nothing that
is compared is fed back.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.common import DOMAINS, prompts, write
from benchmarks.load import CONFIGS, Job, poisson, serve
from cospec import LLM, SamplingParams
from cospec.lasting import keep
from cospec.models.folder import resolve
from cospec.policies.apart import apart
from cospec.policies.cost import ForwardCost
from cospec.profiling.rounds import Measured, fit_rounds
from cospec.simulation.run import World, serve_all
from cospec.simulation.scenario import Scenario
from cospec.stats import RoundStats
from cospec.types import Commit, Event

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
    """Notes the rounds of an engine, and the time that passes in its steps beside them."""

    def __init__(self, llm: LLM) -> None:
        self.rounds: list[Measured] = []
        self.outside = 0.0
        self._drafted: set[str] = set()
        self._policy, self._step = llm.engine.scheduler.policy, llm.engine.step
        self._observe = self._policy.observe
        self._policy.observe = self.observe  # type: ignore[method-assign]
        llm.engine.step = self.step  # type: ignore[method-assign]

    def observe(self, stats: RoundStats, commits: Sequence[Commit]) -> None:
        """A round; whether the drafter saw one of its texts for the first time."""
        ids = {commit.id for commit in commits if commit.drafted}
        fed = not ids <= self._drafted
        self.rounds.extend(Measured(each, fed) for each, _ in apart(stats, commits))
        self._drafted |= ids
        self._observe(stats, commits)

    def step(self) -> list[Event]:
        """One round, timed."""
        began, before = time.perf_counter(), len(self.rounds)
        events = self._step()
        self.outside += time.perf_counter() - began - sum(one.stats.total for one in self.rounds[before:])
        return events

    def take(self) -> tuple[list[Measured], float]:
        """The rounds since the last time, and the mean seconds of a step beside its round."""
        rounds, outside = self.rounds, self.outside / max(1, len(self.rounds))
        self.rounds, self.outside = [], 0.0
        return rounds, outside


@dataclass
class Pair:
    """Latencies of the same requests, turn after turn."""

    measured: list[float] = field(default_factory=list)
    simulated: list[float] = field(default_factory=list)

    def row(self) -> dict[str, dict[str, float]]:
        """Mean and p99 of both, and the relative error."""
        found = {
            name: {"mean": float(np.mean(values)), "p99": float(np.quantile(values, 0.99))}
            for name, values in (("measured", self.measured), ("simulated", self.simulated))
        }
        return {
            **found,
            "error": {each: found["simulated"][each] / found["measured"][each] - 1 for each in ("mean", "p99")},
        }


def simulated(
    folder: Path, jobs: Sequence[Job], name: str, costs: tuple[ForwardCost, ForwardCost], rest: float
) -> list[float]:
    """Latencies of one variant by the simulator; ``folder`` holds the traces."""
    target, draft = ({k: v for k, v in cost.to_json().items()} for cost in costs)
    scenario = Scenario.model_validate(
        {
            "requests": len(jobs),
            "kv_tokens": 200_000,
            "target": {"cost": target, "overhead": rest},
            "drafting": {"cost": draft},
            "domains": [{"trace": "guessed.jsonl", "prompt": {"mean": len(jobs[0].prompt)}}],
            "arrivals": {"kind": "trace", "trace": "arrivals.txt"},
            "variants": [{"name": name, **VARIANTS[name]}],
        }
    )
    found, _ = serve_all(World(scenario, scenario.variants[0], folder), 1.0)
    return found.latencies


def main() -> None:
    """Measure, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 4, 6, 8, 10])
    parser.add_argument("--seconds", type=float, default=3.0, help="of arrivals in one turn")
    parser.add_argument("--fewest", type=int, default=8, help="requests in one turn")
    parser.add_argument("--turns", type=int, default=4)
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
            fitted, jobs = (
                poisson(rate, max(options.fewest, int(rate * options.seconds)), texts, options.tokens, 2 * turn + part)
                for part in (0, 1)
            )
            jobs = [replace(job, due=job.due - jobs[0].due) for job in jobs]
            compare_turn(llms, watches, (fitted, jobs), drafter, {name: pairs[rate, name] for name in llms})
        print(f"turn {turn + 1} of {options.turns}", flush=True)
    rows = [{"rate": rate, "config": name, **pair.row()} for (rate, name), pair in pairs.items()]
    show(rows)
    worst = {each: max(abs(row["error"][each]) for row in rows) for each in ("mean", "p99")}
    middle = {each: float(np.median([abs(row["error"][each]) for row in rows])) for each in ("mean", "p99")}
    print("largest error", worst, "median", middle)
    figures = {"options": vars(options), "rows": rows, "worst": worst, "median": middle}
    print("written to", write(options.name, figures))


def compare_turn(
    llms: Mapping[str, LLM],
    watches: Mapping[str, Watch],
    jobs: tuple[Sequence[Job], Sequence[Job]],
    drafter: Any,
    pairs: Mapping[str, Pair],
) -> None:
    """Fit on the first jobs, serve and simulate the second ones."""
    rights = guessed(drafter, jobs[1], outputs_of(llms["off"], jobs[1]))
    for watch in watches.values():
        watch.take()
    shown, outside, latencies = {}, {}, {}
    for name, llm in llms.items():
        serve(llm.engine, jobs[0], 0.0)
        shown[name], outside[name] = watches[name].take()
        latencies[name] = serve(llm.engine, jobs[1], 0.0)
        watches[name].take()
    everything = [one for rounds in shown.values() for one in rounds]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "guessed.jsonl").write_text("\n".join(map(json.dumps, rights)), encoding="utf-8")
        (folder / "arrivals.txt").write_text("\n".join(str(job.due) for job in jobs[1]), encoding="utf-8")
        for name, pair in pairs.items():
            costs = fit_rounds(everything, shown[name])
            pair.measured += latencies[name]
            pair.simulated += simulated(folder, jobs[1], name, costs, outside[name])


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each rate and configuration."""
    table = Table(
        "requests/s", "config", "mean ms: measured", "simulated", "error", "p99 ms: measured", "simulated", "error"
    )
    for row in rows:
        cells = []
        for each in ("mean", "p99"):
            cells += [
                f"{1e3 * row['measured'][each]:.0f}",
                f"{1e3 * row['simulated'][each]:.0f}",
                f"{row['error'][each]:+.1%}",
            ]
        table.add_row(f"{row['rate']:g}", row["config"], *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
