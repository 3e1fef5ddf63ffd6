"""Measures online serving with drafter nodes whose speeds are injected: CoSine's figure 7 and table 3.

Run ``python -m benchmarks.cosine_online``, which takes about twenty minutes. A processor that computes longer than the
injected times needs longer ones, such as ``--target-ms 100 --row-ms 0.5 --token-ms 16``; requests then arrive at half
the rates, and the run takes twice as long. ``--only`` keeps the other variants of the stored file, if the options are
equal. Target and nodes are those of ``benchmarks.cosine_nodes``: processes that compute, and then sleep until the
injected time has passed. Requests arrive at a low, a high and a changing rate. All variants serve the same requests at
the same times, and their outputs must be equal. A latency counts from the due time. Prices per hour are assumed: those
of the simulated scenarios. The price of a token is that of all machines from the first arrival to the last token, so
idle machines count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, ROOT, prompts, stored, write
from benchmarks.cosine_nodes import MODELS, VARIANTS, nodes, speculative_config
from benchmarks.load import Job, Served, ratio, served
from benchmarks.node_overhead import free_address
from benchmarks.slow_target import add_times, slow_llm
from cospec.assembly.drafters import set_threads
from cospec.core.engine import Engine
from cospec.simulation.scenario import ArrivalConfig
from cospec.simulation.workload import due

TARGET_MS = 50.0  # a pass of the target for which the rates below are; a slower target has fewer requests per second
WARM = 24  # requests before the measurement, from which policies learn
BASELINES = ("SpecInfer, 4 nodes", "PipeInfer", "one drafter", "no drafts")
CHOSEN = (
    "after outcomes",
    "CoSine, 4 nodes",
    "without routing",
    "without fusion",
    "without pipelining",
    "drafting ahead",
    "goodput",
    "goodput without adaptive participation",
    "after outcomes, one drafter",
    *BASELINES,
)  # fewer and fewer nodes, as in ``benchmarks.cosine_nodes``
FIGURES = ("mean_latency", "p99_latency", "tokens_per_second", "acceptance_length")
TARGET_PRICE, DRAFTER_PRICE = 6.0, 0.15  # per hour, as in examples/scenarios/cosine-high.yaml


@dataclass(frozen=True)
class Mode:
    """Arrivals of one kind, and how many requests arrive."""

    arrivals: ArrivalConfig
    requests: int


def segments(*pairs: tuple[float, float]) -> ArrivalConfig:
    """Return arrivals that repeat pairs of seconds and requests per second."""
    return ArrivalConfig.model_validate(
        {"kind": "segments", "segments": [{"seconds": seconds, "rate": rate} for seconds, rate in pairs]}
    )


MODES: Mapping[str, Mode] = {
    "low": Mode(ArrivalConfig(rates=(0.6,)), 24),
    "high": Mode(ArrivalConfig(rates=(6.0,)), 150),
    "changing": Mode(segments((8.0, 1.0), (4.0, 8.0)), 120),
}


def jobs_of(mode: Mode, texts: Sequence[Sequence[int]], options: argparse.Namespace, seed: int) -> list[Job]:
    """Draw the requests of a mode: domains in turn, outputs of one length as in the paper (6.1)."""
    times = due(mode.arrivals, mode.requests, mode.arrivals.rates[0], seed, ROOT)
    slower = options.target_ms / TARGET_MS
    return [Job(slower * at, tuple(texts[number % len(texts)]), options.tokens) for number, at in enumerate(times)]


def busy(engine: Engine) -> float:
    """Return the seconds that all nodes have drafted."""
    return float(sum(node["busy_seconds"] for node in engine.metrics().nodes))


def figures(found: Sequence[Served], jobs: Sequence[Job], count: int, working: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of a variant with ``count`` nodes; ``working`` are seconds of the target and of all nodes."""
    seconds = max(job.due + each.latency for job, each in zip(jobs, found, strict=True)) - jobs[0].due
    tokens, drafts = sum(len(each.tokens) for each in found), max(1, sum(each.stats.drafts for each in found))
    return {
        "latencies": [round(each.latency, 4) for each in found],
        "mean_latency": float(np.mean([each.latency for each in found])),
        "p99_latency": float(np.quantile([each.latency for each in found], 0.99)),
        "tokens_per_second": tokens / seconds,
        "acceptance_length": 1 + sum(each.stats.accepted for each in found) / drafts,
        "target_idle": 1 - working["target"] / seconds,
        "nodes_idle": 1 - working["nodes"] / (seconds * count) if count else None,
        "price_of_million": 1e6 * (TARGET_PRICE + count * DRAFTER_PRICE) * seconds / 3600 / tokens,
    }


def run_variant(
    count: int, speculative: Mapping[str, Any], options: argparse.Namespace
) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """Serve every mode with one variant; return figures by mode, and all outputs."""
    rows, outputs = {}, []
    with slow_llm(speculative, count, options.max_num_seqs, options) as (llm, target):
        groups = zip(*(prompts(domain, 60) for domain in DOMAINS), strict=True)
        texts = [llm.encode(text)[:96] for group in groups for text in group]
        engine = llm.engine
        served(engine, jobs_of(Mode(ArrivalConfig(rates=(3.0,)), WARM), texts, options, 99), 0.0)
        for name in options.modes:
            jobs = jobs_of(MODES[name], texts, options, options.seed)
            drafted, verified = busy(engine), target.busy
            found = served(engine, jobs, 0.0)
            working = {"target": target.busy - verified, "nodes": busy(engine) - drafted}
            rows[name] = figures(found, jobs, count, working)
            outputs.append([each.tokens for each in found])
    return rows, outputs


def compared(rows: Mapping[str, dict[str, Any]]) -> None:
    """Add to each variant of one mode its latency over that of every baseline, with intervals over requests."""
    for name, row in rows.items():
        row["latency_over"] = {
            other: ratio([row["latencies"]], [rows[other]["latencies"]], "mean", restarts=1)
            for other in BASELINES
            if other in rows and other != name
        }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_times(parser)
    parser.add_argument("--token-ms", type=float, default=8.0)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--max-num-seqs", type=int, default=24)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--only", nargs="+", choices=CHOSEN, default=list(CHOSEN))
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--name", default="cosine_online", help="of the file of results")
    options = parser.parse_args()
    options.link_jitter = 0.0
    set_threads(1)
    found: dict[str, dict[str, dict[str, Any]]] = {mode: {} for mode in options.modes}
    outputs, address = [], free_address()
    with nodes(address, list(MODELS), options, 0.0):
        for name in sorted(options.only, key=lambda name: -VARIANTS[name][0]):
            count, pool = VARIANTS[name]
            rows, written = run_variant(count, speculative_config(count, pool, address, options.length), options)
            outputs.append(written)
            for mode, row in rows.items():
                found[mode][name] = row
            print(f"{name} done", flush=True)
    same = all(each == outputs[0] for each in outputs)
    arrivals = {name: json.loads(MODES[name].arrivals.model_dump_json()) for name in options.modes}
    settings = {key: value for key, value in vars(options).items() if key not in ("only", "modes", "name")}
    prices = {"target": TARGET_PRICE, "drafter": DRAFTER_PRICE}
    about = {"options": settings, "arrivals": arrivals, "prices": prices}
    earlier = stored(options.name, about).get("modes", {})  # variants that an earlier command measured
    found = {mode: {**earlier.get(mode, {}), **rows} for mode, rows in found.items()}
    for rows in found.values():
        compared(rows)
    Console(width=200).print(*map(table, found, found.values()))
    print(write(options.name, {**about, "same_outputs": same, "modes": found}, "--only" if earlier else ""))
    raise SystemExit(not same)


def table(mode: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """One line per variant."""
    heads = "latency s", "p99", "tokens/s", "acceptance length", "target idle", "nodes idle", "price of 1M tokens"
    made = Table("variant", *heads, *(f"latency over {name}" for name in BASELINES), title=mode)
    for name, row in rows.items():
        idle = "" if row["nodes_idle"] is None else f"{row['nodes_idle']:.0%}"
        values = [f"{row[key]:.2f}" for key in FIGURES]
        over = [row["latency_over"].get(other) for other in BASELINES]
        ratios = ["{ratio:.2f} ({low:.2f}-{high:.2f})".format_map(one) if one else "" for one in over]
        made.add_row(name, *values, f"{row['target_idle']:.0%}", idle, f"{row['price_of_million']:.2f}", *ratios)
    return made


if __name__ == "__main__":
    main()
