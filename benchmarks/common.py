"""Shared parts of the benchmarks: prompts, the machine in words, alternation, ratios with intervals."""

from __future__ import annotations

import datetime
import json
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cospec.bench.roofline import bandwidth
from cospec.machine import processor

ROOT = Path(__file__).resolve().parent.parent
DOMAINS = ("code", "math", "prose")
RUNS_UNDER = "COSPEC_BENCHMARK_UNDER"  # environment variable: the command that runs a benchmark, in words
DRAFTER = "drafter"  # in counts of calls, next to the members of an ensemble


def prompts(domain: str, count: int) -> list[str]:
    """Return the first ``count`` prompts of a domain from ``examples/data``."""
    lines = (ROOT / "examples" / "data" / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:count]]


def machine() -> dict[str, Any]:
    """Return processor, threads and versions, which every result includes."""
    import transformers

    from cospec.native import operators

    return {
        "date": datetime.date.today().isoformat(),
        "processor": f"{os.cpu_count()} x {processor()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kernels": operators.isa() if operators.available() else operators.why_not(),
        "memory_gb_per_s": round(bandwidth(), 1),
    }


@dataclass
class Samples:
    """Seconds per system, one row per repetition; in a row all systems ran the same work in sequence."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, slow: str, fast: str) -> tuple[float, float, float]:
        """Return the median of the paired ratios slow / fast, and its 95% bootstrap interval."""
        pairs = np.array(self.seconds[slow]) / np.array(self.seconds[fast])
        generator = np.random.default_rng(0)
        draws = generator.choice(pairs, size=(2000, len(pairs)))
        low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
        return float(np.median(pairs)), float(low), float(high)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def mean_over_texts(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float, float]:
    """Return the mean per token over texts, and its 95% bootstrap interval over the texts.

    Tokens of one text are alike, so intervals over tokens would be too narrow.

    Args:
        sums: ``[T]``, of each text's tokens.
        counts: ``[T]``, of the tokens.
    """
    totals, tokens = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    draws = np.random.default_rng(0).integers(len(totals), size=(2000, len(totals)))
    low, high = np.quantile(totals[draws].sum(1) / tokens[draws].sum(1), [0.025, 0.975])
    return float(totals.sum() / tokens.sum()), float(low), float(high)


def alternate(systems: Mapping[str, Callable[[Any], object]], work: Sequence[Any], repeats: int) -> Samples:
    """Time every system on every piece of work, in a new random order each time, after one warm-up each."""
    order, samples = list(systems), Samples({name: [] for name in systems})
    shuffler = random.Random(0)
    for name in order:
        systems[name](work[0])
    for _ in range(repeats):
        for piece in work:
            shuffler.shuffle(order)
            for name in order:
                started = time.perf_counter()
                systems[name](piece)
                samples.seconds[name].append(time.perf_counter() - started)
    return samples


def timed(function: Callable[..., Any], spend: Callable[[float], None]) -> Callable[..., Any]:
    """Return a function that also reports the seconds of each call."""

    def call(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            spend(time.perf_counter() - started)

    return call


def write(name: str, figures: Mapping[str, Any], part: str = "") -> Path:
    """Store figures with their command and machine.

    Args:
        part: the option that measures a part again and keeps the rest; the stored command is that of the whole.
    """
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"command": command(part), "machine": machine(), **figures}, indent=1) + "\n", "utf-8")
    return path


def stored(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that an earlier command stored with the same ``settings``; empty if there are none."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found if found and all(found.get(key) == value for key, value in settings.items()) else {}


def command(without: str = "") -> str:
    """Return this program's command line in repeatable form, after the command that it runs under.

    Args:
        without: an option that is left out with its values.
    """
    options = sys.argv[1:]
    if without in options:
        start = options.index(without)
        values = takewhile(lambda each: not each.startswith("--"), options[start + 1 :])
        del options[start : start + 1 + len(list(values))]
    module = Path(sys.argv[0]).resolve()
    name = ".".join(module.relative_to(ROOT).with_suffix("").parts) if module.is_relative_to(ROOT) else module.stem
    return " ".join([*filter(None, [os.environ.get(RUNS_UNDER)]), shlex.join(["python", "-m", name, *options])])
