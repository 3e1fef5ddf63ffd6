"""Measures the speed of collaborative decoding over standard by gamma, lambda and mu (CoS figures 4 to 6).

Run ``python -m benchmarks.collaborative_sweeps``: one request at a time, prompts of all domains. Figures and plots have
paired ratios with 95% intervals, without the time of prompts. For gamma the last model proposes that many tokens and
the others one. For lambda and mu the engine chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common import DOMAINS, ROOT, write
from benchmarks.ensembles import (
    SETTINGS,
    OutputDistribution,
    Setting,
    Writer,
    batches,
    params,
    rounded,
    time_decoding,
    writer,
)

Curve = dict[float, list[float]]
SWEPT = {"weighted-two": ("gamma", "lambda"), "weighted-small": ("lambda",), "contrastive": ("gamma", "mu")}
TEMPERATURES = {"weighted": 1.0, "contrastive": 0.0}
GAMMAS = range(1, 9)
LAMBDAS = (0.1, 0.3, 0.5, 0.7, 0.9)
MUS = (0.1, 0.2, 0.3, 0.4, 0.5)


def main() -> None:
    """Measure, store, plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", default=list(SWEPT), choices=list(SWEPT))
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--prompts", type=int, default=3, help="per domain")
    parser.add_argument("--name", default="collaborative_sweeps")
    options = parser.parse_args()
    found = {name: sweep(name, options) for name in options.settings}
    print("written to", write(options.name, {"options": vars(options), "sweeps": found}))
    for value in ("gamma", "lambda", "mu"):
        plot({name: curves[value] for name, curves in found.items() if value in curves}, value)


def sweep(name: str, options: argparse.Namespace) -> dict[str, Curve]:
    """Return the curves of a setting."""
    setting = SETTINGS[name]
    standard = writer(setting, {"proposal": "standard"}, 1)
    work = [ids for domain in DOMAINS for ids in batches(standard.llm, domain, 1, options.prompts)]
    chosen = params(TEMPERATURES[setting.ensemble["method"]], options.tokens)

    def ratio(other: Writer, ensemble: OutputDistribution) -> list[float]:
        times = time_decoding({"standard": standard, "other": other}, work, chosen, 1, ensemble)
        return rounded(times.decoding.ratio("standard", "other"))

    ways: dict[str, Callable[[], Curve]] = {
        "gamma": lambda: against_gamma(setting, ratio),
        "lambda": lambda: against_option(setting, ratio, "lambda", LAMBDAS),
        "mu": lambda: against_option(setting, ratio, "mu", MUS),
    }
    found = {}
    for value in SWEPT[name]:
        found[value] = ways[value]()
        print(name, value, found[value], flush=True)
    return found


Ratio = Callable[[Writer, OutputDistribution], list[float]]


def against_gamma(setting: Setting, ratio: Ratio) -> Curve:
    """Sweep gamma: the last model proposes gamma tokens, the others one."""
    last = len(setting.models) - 1
    found: Curve = {}
    for gamma in GAMMAS:
        gammas = [1] * last + [gamma]
        fixed = writer(setting, {"proposal": "alternate", "gamma": gammas, "proposer": last}, 1)
        found[gamma] = ratio(fixed, setting.ensemble)
    return found


def against_option(setting: Setting, ratio: Ratio, key: str, values: Sequence[float]) -> Curve:
    """Sweep the ensemble of requests on one engine that chooses the proposals."""
    free = writer(setting, {"proposal": "alternate"}, 1)
    return {value: ratio(free, {"method": setting.ensemble["method"], key: value}) for value in values}


def plot(curves: Mapping[str, Curve], value: str) -> None:
    """Draw one plot per swept value."""
    if not curves:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.2))
    for setting, curve in curves.items():
        points: list[Any] = list(curve)
        middle, low, high = zip(*curve.values(), strict=True)
        axes.plot(points, middle, marker="o", label=setting)
        axes.fill_between(points, low, high, alpha=0.2)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel({"gamma": "γ", "lambda": "λ", "mu": "μ"}[value])
    axes.set_ylabel("speed over standard decoding")
    axes.legend()
    path = ROOT / "docs" / "images" / f"collaborative-{value}.png"
    figure.savefig(path, bbox_inches="tight", dpi=110)
    pyplot.close(figure)
    print("written to", path)


if __name__ == "__main__":
    main()
