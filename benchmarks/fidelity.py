"""Does the simulator tell the truth: the real engine and its simulation, on the same requests at the same times.

First measure the models, in a run of its own: ``cospec profile zoo --drafter zoo:drafter --output
benchmarks/results/profile.json``. Then run ``python -m benchmarks.fidelity``. The engine serves Poisson arrivals at
each rate, without drafts, with three tokens and under ``auto``; the simulator gets the profile's fit, the arrivals,
the lengths, which output tokens the drafter would have guessed, and the time a round takes outside of the models, as
a warm-up at another rate showed it. Nothing that is compared is fed back.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.common import DOMAINS, ROOT, prompts, write
from benchmarks.load import CONFIGS, Job, poisson, serve
from cospec import LLM, SamplingParams
from cospec.models.folder import resolve
from cospec.simulation.run import simulate
from cospec.simulation.scenario import Scenario

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


def overhead(llms: Mapping[str, LLM], texts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
    """Seconds of a round outside of drafting and verification, in a warm-up at a rate that is not compared."""
    found = {}
    for name, llm in llms.items():
        jobs = poisson(10, 40, texts, tokens, 99)
        serve(llm.engine, jobs, 0.0)
        before = llm.engine.metrics()
        serve(llm.engine, poisson(10, 60, texts, tokens, 98), 0.0)
        after = llm.engine.metrics()
        spent = [
            getattr(after, each) - getattr(before, each)
            for each in ("round_seconds", "draft_seconds", "target_seconds")
        ]
        found[name] = (spent[0] - spent[1] - spent[2]) / (after.rounds - before.rounds)
    return found


def simulated(folder: Path, jobs: Sequence[Job], profile: Path, name: str, rest: float) -> dict[str, float]:
    """Mean and p99 latency of one variant by the simulator; ``folder`` holds the traces."""
    (folder / "profile.json").write_text(profile.read_text(encoding="utf-8"), encoding="utf-8")
    names = [each["name"] for each in json.loads(profile.read_text(encoding="utf-8"))["profiles"]]
    scenario = Scenario.model_validate(
        {
            "requests": len(jobs),
            "kv_tokens": 200_000,
            "target": {"cost": {"profile": "profile.json", "model": names[0]}, "overhead": rest},
            "drafting": {"cost": {"profile": "profile.json", "model": names[-1]}},
            "domains": [{"trace": "guessed.jsonl", "prompt": {"mean": len(jobs[0].prompt)}}],
            "arrivals": {"kind": "trace", "trace": "arrivals.txt"},
            "variants": [{"name": name, **VARIANTS[name]}],
        }
    )
    latency: dict[str, float] = simulate(scenario, folder)["runs"][0]["latency"]
    return latency


def main() -> None:
    """Measure, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 5, 12, 16, 20])
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of every prompt")
    parser.add_argument("--profile", type=Path, default=ROOT / "benchmarks" / "results" / "profile.json")
    parser.add_argument("--name", default="fidelity")
    options = parser.parse_args()
    llms = {name: LLM("zoo", CONFIGS[name], enable_prefix_caching=False) for name in VARIANTS}
    drafter = AutoModelForCausalLM.from_pretrained(resolve("zoo:drafter"), dtype=torch.float32).eval()
    listed = [llms["off"].encode(t) for trio in zip(*(prompts(d, 100) for d in DOMAINS), strict=True) for t in trio]
    texts = [ids[: options.prompt] for ids in listed if len(ids) >= options.prompt]
    rest = overhead(llms, texts, options.tokens)
    rows = []
    for rate in options.rates:
        jobs = poisson(rate, options.requests, texts, options.tokens, 7)
        jobs = [replace(job, due=job.due - jobs[0].due) for job in jobs]
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            rights = guessed(drafter, jobs, outputs_of(llms["off"], jobs))
            (folder / "guessed.jsonl").write_text("\n".join(map(json.dumps, rights)), encoding="utf-8")
            (folder / "arrivals.txt").write_text("\n".join(str(job.due) for job in jobs), encoding="utf-8")
            for name, llm in llms.items():
                real = np.array(serve(llm.engine, jobs, 0.0))
                measured = {"mean": float(real.mean()), "p99": float(np.quantile(real, 0.99))}
                computed = simulated(folder, jobs, options.profile, name, rest[name])
                errors = {each: computed[each] / measured[each] - 1 for each in measured}
                rows.append(
                    {"rate": rate, "config": name, "measured": measured, "simulated": computed, "error": errors}
                )
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
    worst = {each: max(abs(row["error"][each]) for row in rows) for each in ("mean", "p99")}
    middle = {each: float(np.median([abs(row["error"][each]) for row in rows])) for each in ("mean", "p99")}
    print("largest error", worst, "median", middle)
    print("written to", write(options.name, {"rest": rest, "rows": rows, "worst": worst, "median": middle}))


if __name__ == "__main__":
    main()
