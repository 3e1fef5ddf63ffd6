"""Measures what options of ``goodput`` gain over its default, in the engine and in simulation.

Run ``python -m benchmarks.policy_gain``. In the engine, all variants serve the same Poisson arrivals as in
``benchmarks.load``, turn after turn in a new order. Requests at ``CROWD`` per second are all there at once. In the
simulation, all variants serve the same requests on a virtual clock, once per seed. Each figure is the median over turns
or seeds of default / variant (mean latency, or seconds), with an interval from resampled turns: above 1 is a gain. In
the simulation, long drafts are compared with a limit of 8 tokens. In the engine, the default has the growing limit, so
a figure below 1 for *limit of 8* is a gain of the growing limit.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, ROOT, Samples, prompts, write
from benchmarks.load import WARM, poisson, serve
from cospec import LLM
from cospec.policies.policy_build_context import DEFAULT_MAX_LENGTH
from cospec.process_utils import freeze_gc
from cospec.simulation.run import simulate
from cospec.simulation.scenario import Scenario

DEFAULT = "default"
OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "draft_model": {
        DEFAULT: {},
        "choose_batch": {"policy_options": {"choose_batch": True}},
        "per_position": {"policy_options": {"per_position": True}},
        "trees": {"policy_options": {"trees": True}},
        "limit of 8": {"num_speculative_tokens": DEFAULT_MAX_LENGTH},
    },
    "heads": {DEFAULT: {}, "per_position": {"policy_options": {"per_position": True}}},
}
"""What the variants add to the configuration of speculation, by drafting method."""
CROWD = 1000.0  # requests per second: none arrives after the first step
SCENARIOS = (
    ("batch-choice", ("goodput", "goodput with batch choice")),
    ("draft-shapes", ("goodput", "rates by position", "trees", "trees and rates by position")),
    ("head-shapes", ("goodput", "rates by level")),
    ("long-drafts", ("limit of 8", "growing limit")),
    ("long-drafts", ("usual acceptance limit of 8", "usual acceptance growing limit")),
)
"""Scenarios and variants, each compared with the first variant; ``goodput`` has the growing limit by default."""


def in_engine(rates: Sequence[float], turns: int, tokens: int) -> list[dict[str, Any]]:
    """Return a row per drafting method, rate and variant."""
    given = {
        (method, name): {"method": method, "policy": "goodput", **own}
        for method, variants in OPTIONS.items()
        for name, own in variants.items()
    }
    llms = {each: LLM("zoo", config, enable_prefix_caching=False) for each, config in given.items()}
    groups, any_llm = zip(*(prompts(domain, 60) for domain in DOMAINS), strict=True), next(iter(llms.values()))
    texts = [any_llm.encode(text)[:96] for group in groups for text in group]
    for llm in llms.values():
        serve(llm.engine, poisson(8, WARM, texts, tokens, 99), 0.0)
    freeze_gc()
    shuffler = random.Random(0)
    found = {(method, rate): Samples({name: [] for name in OPTIONS[method]}) for rate in rates for method in OPTIONS}
    for turn in range(turns):
        for rate in rates:
            jobs = poisson(rate, max(6, min(32, int(2.5 * rate))), texts, tokens, turn)
            for method, name in shuffler.sample(list(llms), len(llms)):
                seconds = float(np.mean(serve(llms[method, name].engine, jobs, 0.0)))
                found[method, rate].seconds[name].append(seconds)
        print(f"turn {turn + 1} of {turns}", flush=True)
    return [
        row(f"engine, {method}", rate, name, each, DEFAULT)
        for (method, rate), each in found.items()
        for name in OPTIONS[method]
    ]


def in_simulation(seeds: int) -> list[dict[str, Any]]:
    """Return a row per scenario, load and variant."""
    rows = []
    for scenario, names in SCENARIOS:
        read = Scenario.read(ROOT / "examples" / "scenarios" / f"{scenario}.yaml")
        chosen = tuple(variant for variant in read.variants if variant.name in names)
        found: dict[float, Samples] = {}
        for seed in range(seeds):
            for run in simulate(read.model_copy(update={"seed": read.seed + 100 * seed, "variants": chosen}))["runs"]:
                samples = found.setdefault(run["load"], Samples({name: [] for name in names}))
                samples.seconds[run["variant"]].append(1.0 / run["throughput"])
        rows += [row(scenario, load, name, each, names[0]) for load, each in found.items() for name in names]
    return rows


def row(where: str, load: float, name: str, samples: Samples, default: str) -> dict[str, Any]:
    """Return a variant's gain over the default."""
    gain, low, high = samples.ratio(default, name)
    return {"where": where, "load": load, "variant": name, "gain": gain, "low": low, "high": high}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="*", default=[8, 24, CROWD])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="mean length of an output")
    parser.add_argument("--seeds", type=int, default=3, help="of each simulated scenario")
    parser.add_argument("--name", default="policy_gain")
    options = parser.parse_args()
    rows = in_simulation(options.seeds) if options.seeds else []
    rows += in_engine(options.rates, options.turns, options.tokens) if options.turns else []
    table = Table("where", "load", "variant", "gain")
    for each in rows:
        cells = each["where"], f"{each['load']:g}", each["variant"]
        table.add_row(*cells, f"{each['gain']:.3f} ({each['low']:.3f}-{each['high']:.3f})")
    Console(width=120).print(table)
    print("written to", write(options.name, {"options": vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
