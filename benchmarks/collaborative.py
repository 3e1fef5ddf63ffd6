"""Several models as one: tokens per second of standard, naive and alternating collaborative decoding (CoS section 4).

Run ``python -m benchmarks.collaborative``. For every setting, batch, temperature and domain all systems write the same
number of tokens on the same prompts in one process, in random order: ``standard`` asks every model for every token,
``plain`` lets a small drafter that is no member draft for the blend of all, ``naive`` lets it propose as a member, and
``alternate`` lets all propose. Predictions stand beside what was measured: CoS's theorems 3.1 and 3.6 from the observed
acceptance and cost, and the exact process of CoS's rounds. ``--sweeps`` adds speed against gamma, lambda and mu
(figures 4 to 6).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, ROOT, Samples, alternate, prompts, write
from cospec import LLM, CospecError, SamplingParams
from cospec.models.loading import resolve
from cospec.policies.collaboration import Collaboration
from cospec.policies.theory import acceptance_bound, alternate_factor, naive_factor

Ids = list[list[int]]
Law = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """Models and their blend."""

    models: tuple[str, ...]
    law: Law


SETTINGS = {
    "weighted-two": Setting(("zoo", "zoo:target-prose"), {"blend": "weighted", "weights": [0.5, 0.5]}),
    "weighted-three": Setting(("zoo", "zoo:target-prose", "zoo:target-code"), {"blend": "weighted"}),
    "weighted-small": Setting(("zoo", "zoo:drafter"), {"blend": "weighted", "lambda": 0.3}),
    "contrastive": Setting(("zoo", "zoo:drafter"), {"blend": "contrastive", "mu": 0.1}),
}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--prompts", type=int, default=2, help="batches per domain")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--parallel", action="store_true", help="measure models in threads as well")
    parser.add_argument("--sweeps", action="store_true", help="speed against gamma, lambda and mu, with plots")
    parser.add_argument("--name", default="collaborative")
    options = parser.parse_args()
    figures: dict[str, Any] = {"options": vars(options), "settings": {}, "sweeps": {}}
    for name in options.settings:
        setting = SETTINGS[name]
        missing = _missing(setting)
        if missing:
            print(f"{name} is left out: {missing}")
            continue
        figures["settings"][name] = measure(name, setting, options)
        if options.sweeps:
            figures["sweeps"][name] = sweep(setting, options)
    if options.sweeps:
        plot(figures["sweeps"], options.name)
    print("written to", write(options.name, figures))


def measure(name: str, setting: Setting, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row of figures for each batch, temperature and domain."""
    engines = systems(setting, options)
    table = Table("batch", "T", "domain", *engines, "calls/token", "alpha", title=f"{name}: tokens/s (over standard)")
    rows = []
    for batch in options.batches:
        for temperature in options.temperatures:
            for domain in DOMAINS:
                work = batches(engines["standard"], domain, batch, options)
                row = {"batch": batch, "temperature": temperature, "domain": domain}
                row |= compare(engines, setting, work, params(temperature, options.tokens))
                rows.append(row)
                table.add_row(str(batch), f"{temperature:g}", domain, *_cells(row))
    Console().print(table)
    for row in rows:
        print(f"batch {row['batch']}, T = {row['temperature']:g}, {row['domain']}: {row['theory']}")
    return rows


def compare(
    engines: Mapping[str, LLM], setting: Setting, work: Sequence[Ids], chosen: SamplingParams
) -> dict[str, Any]:
    """Speeds, ratios over ``standard``, calls per token, and what theory says."""
    timed = {name: functools.partial(_write, llm, chosen) for name, llm in engines.items()}
    samples = alternate(timed, work, 2)
    tokens = len(work[0]) * (chosen.max_tokens or 0)
    found: dict[str, Any] = {"tokens_per_second": {}, "over_standard": {}, "calls_per_token": {}}
    for name, llm in engines.items():
        found["tokens_per_second"][name] = round(tokens / samples.median(name), 1)
        found["over_standard"][name] = [round(value, 2) for value in samples.ratio("standard", name)]
        found["calls_per_token"][name] = calls_per_token(llm, work[0], chosen)
    found["theory"] = theory(engines, setting, samples)
    return found


def theory(engines: Mapping[str, LLM], setting: Setting, samples: Samples) -> dict[str, Any]:
    """Acceptance and its bound, and predicted factors beside the measured ones."""
    naive, alternating = caster(engines["naive"]), caster(engines["alternate"])
    first = naive.casting.order[0]
    scorers = sum(naive.costs) - naive.costs[first]
    c, gamma, alpha = naive.costs[first] / scorers, max(1, naive.casting.gammas[first]), naive.alphas[first]
    proposer, scorer = alternating.casting.order[0], alternating.casting.order[-1]
    their_c = alternating.costs[proposer] / (sum(alternating.costs) - alternating.costs[proposer])
    weights = setting.law.get("weights")
    bounds = [round(acceptance_bound(weights, place), 2) for place in range(len(weights))] if weights else None
    return {
        "alpha": [round(alpha, 3) for alpha in alternating.alphas],
        "bound": bounds,
        "gammas": alternating.casting.gammas,
        "c": round(their_c, 3),
        "theorem 3.1": round(naive_factor(alpha, gamma, c), 2),
        "naive process": round(naive.predicted(naive.casting), 2),
        "naive measured": round(samples.ratio("standard", "naive")[0], 2),
        "theorem 3.6": round(
            alternate_factor(
                alternating.alphas[proposer],
                max(1, alternating.casting.gammas[proposer]),
                their_c,
                max(1, alternating.casting.gammas[scorer]),
                alternating.alphas[scorer],
            ),
            2,
        ),
        "alternate process": round(alternating.predicted(alternating.casting), 2),
        "alternate measured": round(samples.ratio("standard", "alternate")[0], 2),
    }


def sweep(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Speed over standard against gamma, and against lambda or mu, one request at a time."""
    chosen = params(1.0 if setting.law["blend"] == "weighted" else 0.0, options.tokens)
    found: dict[str, Any] = {"gamma": {}}
    standard = engine(setting, options, {"proposal": "standard"})
    work = [ids for domain in DOMAINS for ids in batches(standard, domain, 1, options)]
    last = len(setting.models) - 1
    for gamma in range(1, 9):
        gammas = [gamma if model == last else 1 for model in range(last + 1)]
        fixed = engine(setting, options, {"proposal": "alternate", "gamma": gammas, "proposer": last})
        found["gamma"][gamma] = _ratio(standard, fixed, work, chosen, setting.law)
    free = engine(setting, options, {"proposal": "alternate"})
    if setting.law["blend"] == "contrastive":
        laws = {mu: {"blend": "contrastive", "mu": mu} for mu in (0.1, 0.2, 0.3, 0.4, 0.5)}
        found["mu"] = {mu: _ratio(standard, free, work, chosen, law) for mu, law in laws.items()}
    elif len(setting.models) == 2:
        laws = {tenth / 10: {"blend": "weighted", "lambda": tenth / 10} for tenth in range(1, 10)}
        found["lambda"] = {value: _ratio(standard, free, work, chosen, law) for value, law in laws.items()}
    return found


def _ratio(standard: LLM, other: LLM, work: Sequence[Ids], chosen: SamplingParams, law: Law) -> list[float]:
    timed = {
        "standard": functools.partial(_write, standard, chosen, law=law),
        "other": functools.partial(_write, other, chosen, law=law),
    }
    return [round(value, 2) for value in alternate(timed, work, 1).ratio("standard", "other")]


def plot(sweeps: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """One picture per swept value, beside the figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for value in ("gamma", "lambda", "mu"):
        figure, axes = pyplot.subplots(figsize=(5, 3.5))
        for setting, found in sweeps.items():
            points = {float(x): y for x, y in found.get(value, {}).items()}
            if points:
                axes.plot(list(points), [y[0] for y in points.values()], marker="o", label=setting)
                axes.fill_between(list(points), *zip(*(y[1:] for y in points.values()), strict=True), alpha=0.2)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_xlabel(value)
        axes.set_ylabel("speed over standard")
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
            path = ROOT / "benchmarks" / "results" / f"{name}_{value}.svg"
            figure.savefig(path, bbox_inches="tight")
            print("written to", path)
        pyplot.close(figure)


def systems(setting: Setting, options: argparse.Namespace) -> dict[str, LLM]:
    """The engines by name."""
    last = len(setting.models) - 1
    draft = {"method": "draft_model", "model": "zoo:drafter"}
    found = {
        "standard": engine(setting, options, {"proposal": "standard"}),
        "plain": engine(setting, options, {"proposal": "standard"}, speculative_config=draft),
        "naive": engine(setting, options, {"proposal": "naive", "proposer": last}),
        "alternate": engine(setting, options, {"proposal": "alternate"}),
    }
    if options.parallel:
        found["parallel"] = engine(setting, options, {"proposal": "parallel"})
    return found


def engine(setting: Setting, options: argparse.Namespace, collaboration: Law, **more: Any) -> LLM:
    """An engine of the setting with the given way of proposing."""
    given = {"threads": options.threads} if options.threads else {}
    return LLM(
        models=setting.models,
        law=setting.law,
        collaboration=collaboration,
        max_num_seqs=max(options.batches),
        kv_cache_memory_bytes=256 << 20,
        **given,
        **more,
    )


def caster(llm: LLM) -> Collaboration:
    """Who decides in this engine who proposes how much."""
    found: Collaboration = llm.engine.round.crew.members.policy  # type: ignore[attr-defined]
    return found


def batches(llm: LLM, domain: str, batch: int, options: argparse.Namespace) -> list[Ids]:
    """Prompts in groups that run at once."""
    ids = [llm.encode(text)[:192] for text in prompts(domain, options.prompts * batch)]
    return [ids[start : start + batch] for start in range(0, len(ids), batch)]


def calls_per_token(llm: LLM, ids: Ids, chosen: SamplingParams) -> dict[str, float]:
    """Calls of each model for one committed token, the prompt's call included."""
    outputs = llm.generate(ids, chosen)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    names = sorted({name for output in outputs for name in output.stats.model_calls})
    return {name: round(sum(o.stats.model_calls.get(name, 0) for o in outputs) / tokens, 3) for name in names}


def params(temperature: float, tokens: int) -> SamplingParams:
    """To a fixed length; without a seed, so that sampled proposals are judged by their probabilities."""
    return SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)


def _write(llm: LLM, chosen: SamplingParams, ids: Ids, law: Law | None = None) -> object:
    return llm.generate(ids, chosen, law=law)


def _missing(setting: Setting) -> str:
    """Why a model of the setting cannot be had; empty when all can."""
    for name in setting.models:
        try:
            resolve(name)
        except CospecError as error:
            return str(error)
    return ""


def _cells(row: Mapping[str, Any]) -> list[str]:
    speeds = [f"{speed:.0f} ({row['over_standard'][name][0]:.2f})" for name, speed in row["tokens_per_second"].items()]
    calls = sum(row["calls_per_token"]["alternate"].values())
    return [*speeds, f"{calls:.2f}", ", ".join(f"{alpha:.2f}" for alpha in row["theory"]["alpha"])]


if __name__ == "__main__":
    main()
