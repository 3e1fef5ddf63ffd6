"""Compares single drafters and pools: gains by domain, and costs.

Run ``python -m benchmarks.pool``. Every system generates the same outputs for the same prompts: each domain alone, and
all domains mixed in a batch; greedy, and at temperature 0.8. Before, every system has written outputs for other prompts
of all domains, as a server has, because pools learn which drafters are best for which prompts. No prompt comes twice.
Requests are seeded, so all systems use ``match``, except ``mix block``, which is unseeded and uses ``block``. All
systems are loaded together and run every batch in sequence, in a new order each time, so that a slow minute of the
machine affects all.

Figures, with 95% bootstrap intervals over the prompts:
- acceptance: mean acceptance length, 1 + accepted / drafts.
- tokens per call: committed tokens per forward of the target, for one request.
- verified: target tokens computed per committed token, drafts included.
- tokens/s: of all batches of all repeats, and the interval over batches.
- specialists: draft acceptance (accepted / drafted) of each on its domain, as ratios to the other drafters.
- same nodes: acceptance lengths of ``union`` and ``fuse`` as ratios to the best drafter's tree of as many nodes.
- hedge: how the acceptance that ``hedge`` reaches compares with the best drafter in hindsight, and with other routings;
  and its tokens/s with those of other routings, batch by batch, all workloads together.
- one: acceptance length and tokens/s of the pool with one drafter per request over the best single drafter, for each
  workload and for all.
- own: share of the rounds' time that the pool spends in combining, weighting and routing.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, write
from benchmarks.pool_prompts import MIXED, interleaved, prompts_used, workloads
from benchmarks.pool_tables import ONE
from cospec import LLM, SamplingParams
from cospec.core.stats import RequestStats
from cospec.drafters.pool.pool import PoolDrafter
from cospec.errors import ModelError
from cospec.models.model_folder import resolve
from cospec.process_utils import freeze_gc

DRAFTERS, COPY = ("generic", "code", "math", "prose"), "copy"
ZOO_NAMES = {"generic": "drafter"}
COMBINERS = ("union", "vote", "fuse", "mix")
ALL = "all"
TEMPERATURES = 0.0, 0.8
ROOM = 1 << 28  # bytes of KV cache of each system
Interval = tuple[float, float, float]


@dataclass
class Runs:
    """All runs of one system on one workload at one temperature."""

    stats: list[RequestStats] = field(default_factory=list)  # per prompt
    tokens: list[int] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)  # per batch
    own: list[float] = field(default_factory=list)
    parts: list[Mapping[str, float]] = field(default_factory=list)  # milliseconds per token of each batch

    def add(self, other: Runs) -> None:
        """Add the runs of another workload."""
        self.stats += other.stats
        self.tokens += other.tokens
        self.speeds += other.speeds
        self.own += other.own
        self.parts += other.parts

    def acceptance(self, prompts: Any = slice(None)) -> float:
        """Return the mean acceptance length over some prompts, by number."""
        counts = np.array([(each.accepted, each.drafts) for each in self.stats], dtype=np.float64)[prompts].sum(0)
        return float(1.0 + counts[0] / max(1.0, counts[1]))

    def draft_acceptance(self, prompts: Any = slice(None)) -> float:
        """Return accepted per drafted tokens over some prompts, by number."""
        counts = np.array([(each.accepted, each.drafted) for each in self.stats], dtype=np.float64)[prompts].sum(0)
        return float(counts[0] / max(1.0, counts[1]))

    def figures(self) -> dict[str, Any]:
        """Return the figures of the table."""
        columns = {
            name: np.array([getattr(each, name) for each in self.stats], dtype=np.float64)
            for name in ("accepted", "drafts", "drafted", "target_calls")
        } | {"tokens": np.array(self.tokens, dtype=np.float64)}
        found: dict[str, Any] = {name: interval(columns, ratio) for name, ratio in RATIOS.items()}
        found["tokens_per_s"] = rate(self.speeds)
        found["own_share"] = statistics.median(self.own) if self.own else None
        found["ms_per_token"] = {name: statistics.fmean(part[name] for part in self.parts) for name in PARTS}
        return found


PARTS = ("scoring", "drafting", "target", "rest")  # of a step's time; *scoring* of known tokens by drafters
RATIOS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "acceptance": lambda sums: 1.0 + sums["accepted"] / max(1.0, sums["drafts"]),
    "tokens_per_call": lambda sums: sums["tokens"] / sums["target_calls"],
    "verified": lambda sums: (sums["drafted"] + sums["target_calls"]) / sums["tokens"],
}


def interval(columns: Mapping[str, Any], ratio: Callable[[Mapping[str, Any]], float], draws: int = 2000) -> Interval:
    """Return a ratio of sums over the prompts, and its 95% bootstrap interval."""
    count = len(columns["tokens"])
    picks = np.random.default_rng(0).integers(0, count, (draws, count))
    resampled = [ratio({name: column[pick].sum() for name, column in columns.items()}) for pick in picks]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return ratio({name: column.sum() for name, column in columns.items()}), float(low), float(high)


def spread(values: Sequence[float], draws: int = 2000) -> Interval:
    """Return the median and its 95% bootstrap interval."""
    picks = np.random.default_rng(0).choice(np.array(values), size=(draws, len(values)))
    low, high = np.quantile(np.median(picks, axis=1), [0.025, 0.975])
    return statistics.median(values), float(low), float(high)


def rate(speeds: Sequence[float], over: Sequence[float] | None = None, draws: int = 2000) -> Interval:
    """Return the speed of batches with equally many tokens together, and its 95% bootstrap interval.

    Args:
        over: speeds of another system in the same batches; the result is then the ratio of the speeds.
    """
    seconds = np.array([[1.0 / speed for speed in speeds], [1.0 / speed for speed in over or speeds]])
    picks = np.random.default_rng(0).integers(0, len(speeds), (draws, len(speeds)))

    def value(pick: Any) -> float:
        own, others = seconds[:, pick].sum(axis=1)
        return float(len(speeds) / own if over is None else others / own)

    low, high = np.quantile([value(pick) for pick in picks], [0.025, 0.975])
    return value(slice(None)), float(low), float(high)


Key = tuple[str, str, float]  # system, workload, temperature


def hedged(runs: Mapping[Key, Runs]) -> list[dict[str, Any]]:
    """Return acceptance lengths of ``hedge`` as ratios to the best drafter in hindsight and to other routings.

    Each ratio has a 95% bootstrap interval over the common prompts.
    """
    ratios = []
    for system, workload, temperature in runs:
        if not system.endswith(" hedge") or system[0].isdigit():
            continue
        own, combiner = runs[system, workload, temperature], system.split()[0]
        alone = [name for name in DRAFTERS if (name, workload, temperature) in runs]
        best = max(alone, key=lambda name: runs[name, workload, temperature].acceptance(), default="")
        others = {"best alone": best} | {other: f"{combiner} {other}" for other in ("all", "explore")}
        ratios.append(
            {"combiner": combiner, "workload": workload, "temperature": temperature}
            | {
                name: paired(Runs.acceptance, own, runs[other, workload, temperature])
                for name, other in others.items()
                if (other, workload, temperature) in runs
            }
        )
    return ratios


def hedged_speed(runs: Mapping[Key, Runs]) -> list[dict[str, Any]]:
    """Return tokens per second of ``hedge`` over other routings: the median over all batches, and its interval."""
    ratios = []
    for combiner, temperature in product(COMBINERS, (0.0, 0.8)):
        row: dict[str, Any] = {"combiner": combiner, "temperature": temperature}
        for other in ("all", "explore"):
            pairs = [
                ours / theirs
                for (system, workload, at), own in runs.items()
                if (system, at) == (f"{combiner} hedge", temperature) and (f"{combiner} {other}", workload, at) in runs
                for ours, theirs in zip(own.speeds, runs[f"{combiner} {other}", workload, at].speeds, strict=True)
            ]
            row |= {other: spread(pairs)} if pairs else {}
        ratios.append(row)
    return ratios


def chosen_one(runs: Mapping[Key, Runs]) -> list[dict[str, Any]]:
    """Return acceptance and tokens per second of the pool with one drafter per request over those of single drafters.

    These are the member with most tokens per second in hindsight, and prompt lookup, which is no member.
    """
    ratios = []
    for (system, workload, temperature), others in product(runs, (DRAFTERS, (COPY,))):
        place = workload, temperature
        if system == ONE and (alone := [name for name in others if (name, *place) in runs]):
            best = max(alone, key=lambda name: rate(runs[name, *place].speeds)[0])
            own, other = runs[system, *place], runs[best, *place]
            speed = rate(own.speeds, other.speeds)
            ratios.append(
                {"workload": workload, "temperature": temperature, "of": best}
                | {"acceptance": paired(Runs.acceptance, own, other), "tokens/s": speed}
            )
    return ratios


def specialised(runs: Mapping[Key, Runs]) -> list[dict[str, Any]]:
    """Return each specialist's draft acceptance on its domain as ratios to other drafters', with intervals."""
    ratios = []
    for system, workload, temperature in runs:
        if system in DOMAINS and system == workload:
            own = runs[system, workload, temperature]
            others = [name for name in DRAFTERS if name != system and (name, workload, temperature) in runs]
            ratios.append(
                {"specialist": system, "temperature": temperature}
                | {name: paired(Runs.draft_acceptance, own, runs[name, workload, temperature]) for name in others}
            )
    return ratios


def ratios_to_trees(runs: Mapping[Key, Runs]) -> list[dict[str, Any]]:
    """Return acceptance lengths of pools with trees as ratios to the best single drafter's tree, with intervals."""
    ratios = []
    for system, workload, temperature in runs:
        trees = [name for name in DRAFTERS if (f"{name} tree", workload, temperature) in runs]
        if trees and system in ("union hedge", "fuse hedge"):
            best = max(trees, key=lambda name: runs[f"{name} tree", workload, temperature].acceptance())
            own, other = runs[system, workload, temperature], runs[f"{best} tree", workload, temperature]
            ratios.append(
                {"combiner": system.split()[0], "workload": workload, "temperature": temperature, "of": best}
                | {"best tree": paired(Runs.acceptance, own, other)}
            )
    return ratios


def paired(measure: Callable[..., float], ours: Runs, theirs: Runs, draws: int = 2000) -> Interval:
    """Return the ratio of a measure of two systems on the same prompts, and its interval."""
    picks = np.random.default_rng(0).integers(0, len(ours.stats), (draws, len(ours.stats)))
    below = [measure(theirs, pick) for pick in picks]
    ratios = [measure(ours, pick) / other for pick, other in zip(picks, below, strict=True) if other > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return measure(ours) / measure(theirs), float(low), float(high)


def member(name: str) -> dict[str, Any]:
    """Return the options of a zoo drafter or of prompt lookup."""
    if name == COPY:
        return {"name": name, "method": "ngram"}
    return {"name": name, "method": "draft_model", "model": f"zoo:{ZOO_NAMES.get(name, name)}"}


def shipped(name: str) -> bool:
    """Whether the zoo has the drafter."""
    try:
        resolve(member(name)["model"])
    except ModelError:
        return False
    return True


def pool(combiner: str, routing: str, names: Sequence[str], at_most: int | None = None) -> dict[str, Any]:
    """Return the options of a pool of zoo drafters."""
    found: dict[str, Any] = {"method": "pool", "combiner": combiner, "routing": routing}
    bound = {} if at_most is None else {"at_most": at_most}
    return found | bound | {"drafters": [member(name) for name in names]}


def systems(names: Sequence[str], length: int, nodes: int) -> dict[str, dict[str, Any]]:
    """Return the compared ``speculative_config`` by name."""
    found: dict[str, dict[str, Any]] = {}
    for name in (*names, COPY):
        given = member(name)
        found[name] = {key: value for key, value in given.items() if key != "name"} | {"max_nodes": length}
    for name in names:
        found[f"{name} tree"] = found[name] | {"max_nodes": nodes}
    for combiner in COMBINERS:
        found[f"{combiner} hedge"] = pool(combiner, "hedge", (*names, COPY))
    found["mix block"] = pool("mix", "hedge", (*names, COPY)) | {"acceptance_method": "block"}
    for combiner in COMBINERS:
        for routing in ("all", "explore"):
            found[f"{combiner} {routing}"] = pool(combiner, routing, (*names, COPY))
    found[ONE] = pool("vote", "hedge", names, at_most=1)
    for count in (count for count in (1, 2, 4) if count <= len(names)):
        some = names[:count]
        found[f"{count}: fuse hedge"] = pool("fuse", "hedge", some)
        found[f"{count}: no fusion"] = pool("union", "hedge", some)
        found[f"{count}: no routing"] = pool("fuse", "all", some)
    shape = {"num_speculative_tokens": length, "max_nodes": nodes, "policy": "fixed", "execution_mode": "sequential"}
    return {name: shape | given for name, given in found.items()}


def run(llm: LLM, texts: Sequence[str], params: SamplingParams, runs: Runs) -> None:
    """Run one batch."""
    drafter = llm.engine.execution_mode.components.drafter
    own = drafter.seconds.own if isinstance(drafter, PoolDrafter) else 0.0
    scored, before = 0.0 if drafter is None else drafter.scoring_seconds, llm.engine.metrics()
    written = llm.generate(list(texts), params)
    after = llm.engine.metrics()
    taken = after.step_seconds - before.step_seconds
    tokens = [len(output.outputs[0].token_ids) for output in written]
    runs.speeds.append(sum(tokens) / taken)
    scoring = 0.0 if drafter is None else drafter.scoring_seconds - scored
    drafting = after.draft_seconds - before.draft_seconds - scoring
    target = after.target_seconds - before.target_seconds
    seconds = scoring, drafting, target, taken - scoring - drafting - target
    runs.parts.append({name: 1e3 * part / sum(tokens) for name, part in zip(PARTS, seconds, strict=True)})
    if isinstance(drafter, PoolDrafter):
        runs.own.append((drafter.seconds.own - own) / taken)
    runs.stats += [output.stats for output in written]
    runs.tokens += tokens


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo")
    parser.add_argument("--prompts", type=int, default=8, help="of each workload, repeat and temperature")
    parser.add_argument("--earlier", type=int, default=20, help="prompts of each domain before the measurement")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--length", type=int, default=4, help="tokens of the longest path")
    parser.add_argument("--nodes", type=int, default=8, help="tokens of a tree")
    parser.add_argument("--batch", type=int, default=8, help="requests at a time")
    parser.add_argument("--group", type=int, default=None, help="prompts of one call; default: as many as the batch")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=None, help="systems by name")
    parser.add_argument("--workloads", nargs="*", default=None, choices=[*DOMAINS, MIXED])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--name", default="pool")
    options = parser.parse_args()
    names = [name for name in DRAFTERS if shipped(name)]
    used = prompts_used(options.prompts)
    turns = list(product(range(options.repeats), TEMPERATURES))
    prompts_of = {
        turn: workloads(options.earlier + number * used, options.prompts) for number, turn in enumerate(turns)
    }
    runs: dict[Key, Runs] = defaultdict(Runs)
    work = options.workloads or [*DOMAINS, MIXED]
    configs = {
        name: config
        for name, config in systems(names, options.length, options.nodes).items()
        if not options.only or name in options.only
    }
    llms = {
        name: LLM(
            options.model, config, max_num_seqs=options.batch, threads=options.threads, kv_cache_memory_bytes=ROOM
        )
        for name, config in configs.items()
    }
    earlier = interleaved(0, options.earlier)
    for llm in llms.values():
        llm.generate(earlier, SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True))
    freeze_gc()  # as in a server's process
    shuffler = random.Random(0)
    group = options.group or options.batch
    for turn, workload, first in product(turns, work, range(0, options.prompts, group)):
        temperature = turn[1]
        for name in shuffler.sample(list(llms), len(llms)):
            seed = None if "acceptance_method" in configs[name] else 1
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=options.tokens, ignore_eos=True)
            texts = prompts_of[turn][workload][first : first + group]
            run(llms[name], texts, params, runs[name, workload, temperature])
    for name, workload, temperature in product(llms, work, TEMPERATURES):
        runs[name, ALL, temperature].add(runs[name, workload, temperature])
    cells = {key: runs[key] for key in product(llms, [*work, ALL], TEMPERATURES)}
    rows = [
        {"system": name, "workload": workload, "temperature": temperature, **cell.figures()}
        for (name, workload, temperature), cell in cells.items()
    ]
    ratios = {"hedge": hedged(cells), "hedge_speed": hedged_speed(cells), "specialists": specialised(cells)}
    ratios["same_nodes"] = ratios_to_trees(cells)
    ratios["one"] = chosen_one(cells)
    show(rows)
    compare("hedge, as a ratio of acceptance lengths", ratios["hedge"], ("best alone", "all", "explore"))
    compare("hedge, as a ratio of tokens/s", ratios["hedge_speed"], ("all", "explore"))
    compare("one drafter per request, over the best drafter", ratios["one"], ("acceptance", "tokens/s"))
    compare("specialists, as a ratio of draft acceptance", ratios["specialists"], DRAFTERS)
    compare("pools, as a ratio of acceptance lengths at the same nodes", ratios["same_nodes"], ("best tree",))
    print("written to", write(options.name, {"options": vars(options), "rows": rows} | ratios))


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one table per workload and temperature."""
    for workload, temperature in sorted({(row["workload"], row["temperature"]) for row in rows}):
        table = Table("system", "acceptance", "tokens per call", "verified", "tokens/s", "own")
        for row in rows:
            if (row["workload"], row["temperature"]) == (workload, temperature):
                cells = ["{:.2f} ({:.2f} to {:.2f})".format(*row[name]) for name in RATIOS]
                own = "" if row["own_share"] is None else f"{row['own_share']:.1%}"
                table.add_row(row["system"], *cells, "{:.0f} ({:.0f} to {:.0f})".format(*row["tokens_per_s"]), own)
        Console(width=150).print(f"{workload}, temperature {temperature}", table)


def compare(title: str, ratios: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print a table of ratios with their intervals."""
    table = Table(title, *columns)
    for ratio in ratios:
        values = ["{:.3f} ({:.3f} to {:.3f})".format(*ratio[name]) if name in ratio else "" for name in columns]
        table.add_row(", ".join(str(value) for key, value in ratio.items() if key not in columns), *values)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
