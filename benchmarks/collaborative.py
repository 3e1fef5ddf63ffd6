"""Ensembles: tokens per second of standard, naive and alternating collaborative decoding (CoS section 4).

Run ``python -m benchmarks.collaborative``. All systems generate the same number of tokens for the same prompts, in
one process and random order, for every setting, batch, temperature and domain. Prompts are computed before the
measurement; another ratio includes the prompts.

``standard`` asks every model for every token, and ``parallel`` does so in threads. ``plain`` is CoS's SD: the last
model, the smallest, drafts for the ensemble as for one target. In ``outside`` a drafter that is no member drafts.
``naive`` lets one member propose, and ``alternate`` lets all members propose. The engine chooses the proposal lengths
by trial. So every system first generates untimed outputs, at each batch and temperature, for other prompts of all
domains; ``--warm 0`` includes the first trials.

``ms_per_token`` is the mean time of a token of each system, and the part in forwards of any model. The rest is the work
between forwards. ``--instruction-set`` forces the kernels of an older processor.

The tables also have predictions. CoS's theorems 3.1 and 3.6 use the observed acceptance and the time of forward passes.
The exact process of CoS's steps uses the time of whole turns, verification included.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import ensembles
from benchmarks.common import DOMAINS, Samples, write
from benchmarks.cos_theorems import acceptance_bound, alternate_factor, naive_factor
from benchmarks.ensembles import FORWARDS, PLAIN, SETTINGS, Ids, Setting, Times, Writer, params, rounded, writer
from cospec import SamplingParams

Row = dict[str, Any]


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--prompts", type=int, default=5, help="per domain; of requests that run at once two groups")
    parser.add_argument("--warm", type=int, default=1, help="untimed groups of requests per domain")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--name", default="collaborative")
    parser.add_argument("--instruction-set", default="auto", help="of the kernels")
    options = parser.parse_args()
    with FORWARDS.running():
        settings = {name: measure(name, SETTINGS[name], options) for name in options.settings}
    print("written to", write(options.name, {"options": vars(options), "settings": settings}))


def measure(name: str, setting: Setting, options: argparse.Namespace) -> list[Row]:
    """Return one row of figures per batch, temperature and domain, and one over all domains."""
    writers = systems(setting, max(options.batches), options.instruction_set)
    rows = []
    for batch in options.batches:
        count = options.warm + (options.prompts if batch == 1 else 2)
        groups = {domain: ensembles.batches(writers["standard"].llm, domain, batch, count) for domain in DOMAINS}
        for temperature in options.temperatures:
            every = Times(*(Samples({name: [] for name in writers}) for _ in range(2)))
            beforehand = [groups[domain][: options.warm] for domain in DOMAINS]
            warm_up(writers, beforehand, params(temperature, options.tokens))
            for domain in DOMAINS:
                work = groups[domain][options.warm :]
                times = ensembles.time_decoding(writers, work, params(temperature, options.tokens), options.repeats)
                for system in writers:
                    every.decoding.seconds[system] += times.decoding.seconds[system]
                    every.whole.seconds[system] += times.whole.seconds[system]
                found = {"batch": batch, "temperature": temperature, "domain": domain}
                spent = {
                    "calls_per_token": {system: one.calls_per_token() for system, one in writers.items()},
                    "ms_per_token": {system: one.ms_per_token() for system, one in writers.items()},
                    "theory": theory(writers, setting, times.decoding, batch),
                }
                for one in writers.values():
                    one.reset()
                rows.append(found | speeds(times, batch * options.tokens) | spent)
            found = {"batch": batch, "temperature": temperature, "domain": "all"}
            rows.append(found | speeds(every, batch * options.tokens))
    report(name, rows)
    return rows


def warm_up(writers: Mapping[str, Writer], work: Sequence[Sequence[Ids]], chosen: SamplingParams) -> None:
    """Run all prompts on every system, untimed."""
    for one in writers.values():
        for ids in chain.from_iterable(zip(*work, strict=True)):
            one.write(ids, chosen)
        one.reset()


def systems(setting: Setting, batch: int, instruction_set: str) -> dict[str, Writer]:
    """Return the systems by name. In the naive form the last model, usually a small one, proposes."""
    last = len(setting.models) - 1
    build = partial(writer, setting, batch=batch, instruction_set=instruction_set)
    outside = {}
    if PLAIN["model"] not in setting.models:
        outside["outside"] = build({}, speculative_config=PLAIN)
    return {
        "standard": build({"proposal": "standard"}),
        "parallel": build({"proposal": "parallel"}),
        "plain": build({}, speculative_config={**PLAIN, "model": setting.models[last]}),
        **outside,
        "naive": build({"proposal": "naive", "proposer": last}),
        "alternate": build({"proposal": "alternate"}),
    }


def speeds(times: Times, tokens: int) -> Row:
    """Return tokens per second, and ratios over ``standard`` and of ``alternate`` over the others, with intervals."""
    samples, whole = times.decoding, times.whole
    return {
        "tokens_per_second": {name: round(tokens / samples.median(name), 1) for name in samples.seconds},
        "over_standard": {name: rounded(samples.ratio("standard", name)) for name in samples.seconds},
        "alternate_over": {
            name: rounded(samples.ratio(name, "alternate"))
            for name in samples.seconds
            if name not in ("standard", "alternate")
        },
        "with_prompts": {name: rounded(whole.ratio("standard", name)) for name in whole.seconds},
    }


def theory(writers: Mapping[str, Writer], setting: Setting, samples: Samples, batch: int) -> Row:
    """Return acceptance and its bound, and the predicted and measured factors."""
    found: Row = {}
    for kind in ("naive", "alternate"):
        proposer_policy = writers[kind].proposer_policy
        proposer_policy.set_batch_size(batch)
        proposer_schedule = proposer_policy.best
        first, last = proposer_schedule.order[0], proposer_schedule.order[-1]
        alphas, gamma = proposer_policy.alphas, max(1, proposer_schedule.gammas[first])
        c = proposer_policy.costs[first] / (sum(proposer_policy.costs) - proposer_policy.costs[first])
        if kind == "naive":
            found["theorem 3.1"] = round(naive_factor(alphas[first], gamma, c), 2)
        else:
            scorer = max(1, proposer_schedule.gammas[last])
            found["theorem 3.6"] = round(alternate_factor(alphas[first], gamma, c, scorer, alphas[last]), 2)
            found["alpha"] = [round(alpha, 3) for alpha in alphas]
            found["gammas"], found["proposer"], found["c"] = proposer_schedule.gammas, first, round(c, 3)
            found["form"] = (
                ("alternate" if proposer_schedule.alternate else "naive") if proposer_schedule.proposes else "standard"
            )
        found[f"{kind} process"] = round(proposer_policy.predicted(proposer_schedule), 2)
        found[f"{kind} measured"] = rounded(samples.ratio("standard", kind))[0]
    if setting.ensemble["method"] == "weighted":
        count = len(setting.models)
        weights = setting.ensemble.get("weights", [1 / count] * count)
        found["bound"] = [round(acceptance_bound(weights, author), 2) for author in range(count)]
    return found


def report(name: str, rows: Sequence[Row]) -> None:
    """Print the tables."""
    table = Table(
        "batch", "T", "domain", *rows[0]["over_standard"], "with prompts", "calls", title=f"{name}: speed over standard"
    )
    theory_table = Table(
        "batch", "T", "domain", "alpha", "bound", "proposer_schedule", "c", "3.1", "naive", "3.6", "alternate"
    )
    for row in rows:
        where = (str(row["batch"]), f"{row['temperature']:g}", row["domain"])
        ratios = ["{:.2f} ({:.2f}-{:.2f})".format(*ratio) for ratio in row["over_standard"].values()]
        calls = sum(row["calls_per_token"]["alternate"].values()) if "calls_per_token" in row else None
        whole = f"{row['with_prompts']['alternate'][0]:.2f}"
        table.add_row(*where, *ratios, whole, "" if calls is None else f"{calls:.2f}")
        if theory := row.get("theory"):
            proposer_schedule = f"{theory['form']} {theory['gammas']} by {theory['proposer']}"
            pairs = [f"{theory[f'{kind} process']} / {theory[f'{kind} measured']}" for kind in ("naive", "alternate")]
            bound = str(theory.get("bound", ""))
            factors = [str(theory["theorem 3.1"]), pairs[0], str(theory["theorem 3.6"]), pairs[1]]
            theory_table.add_row(*where, str(theory["alpha"]), bound, proposer_schedule, str(theory["c"]), *factors)
    for one in (table, theory_table):
        Console(width=170).print(one)


if __name__ == "__main__":
    main()
