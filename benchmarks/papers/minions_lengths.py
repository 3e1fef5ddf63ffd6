"""Minions' figures 2 and 12: throughput by speculation length, against lengths by slope and by goodput."""

from __future__ import annotations

from benchmarks.papers.common import PLOT, Section
from benchmarks.papers.minions_systems import LENGTHS
from benchmarks.papers.scenarios import Runs
from benchmarks.papers.sources import Found, Results


def selector(results: Results) -> Section:
    """Figure 12."""
    found = results.read(LENGTHS)
    fixed = fixed_lengths(Runs(found)) if found else ("s=2",)
    rows = [
        results.row(
            f"Throughput with {name}, tokens/s",
            PLOT if name != "goodput" else "",
            LENGTHS,
            lambda found, name=name: f"{Runs(found).throughput(name):.0f}",
        )
        for name in (*fixed, "slope", "goodput")
    ]
    rows.append(
        results.row(
            "Best fixed length, of even lengths",
            "OPT-13B at batch 16: 6 (finance), 5 (dialogue); Llama2-70B on dialogue: 5 at batch 8, 2 at batch 16",
            LENGTHS,
            lambda found: max(fixed_lengths(Runs(found)), key=Runs(found).throughput),
        )
    )
    rows += [
        results.row(
            f"{name} over the best even length",
            "close to 1, and above the other lengths" if name == "slope" else "",
            LENGTHS,
            lambda found, name=name: over_best(Runs(found), name),
            results.sentence(LENGTHS, lambda found, name=name: slower(Runs(found), name)),
        )
        for name in ("slope", "goodput")
    ]
    return Section(
        "Figures 2 and 12: adaptive length against fixed ones from 2 to 12",
        tuple(rows),
        "The target's times follow from the size of OPT-13B, on one A100 as in `large_targets.py` (the paper has "
        "two); the drafter's are "
        "assumed. Acceptance is 0.75, 32 requests are in the engine, pipelined. Figure 2 shows the time by "
        "length, without numbers but the best lengths. "
        f"{results.sentence(LENGTHS, shape)} "
        f"{results.sentence(LENGTHS, shorter)} Prompts have 64 tokens in the mean, outputs 16 to 512, 128 in the mean; "
        "the paper has at most 128 new tokens (5.1), in figure 12 batches of 16 (5.4) and a vote of its drafters. The "
        "best lengths are figure 2's, a motivation: they have the least time of inference, with one drafter as "
        "released (section 2), and odd lengths count. Ours have the highest pipelined throughput.",
    )


def shorter(found: Found) -> str:
    """Why adaptive lengths lose to the best fixed one when drafts overlap with the target, by parts."""
    runs = Runs(found)
    best = runs.at(max(fixed_lengths(runs), key=runs.throughput))
    cells = []
    for name in ("slope", "goodput"):
        own = runs.at(name)
        tokens, rate = (
            per_step(own) / per_step(best),
            own["rounds"] / own["seconds"] * best["seconds"] / best["rounds"],
        )
        cells.append(
            f"{name} drafts {own['mean_k']:.1f} tokens: {tokens:.2f}× tokens of a step · {rate:.2f}× steps per second"
        )
    return f"Over the best length, which drafts {best['mean_k']:.1f}, {'; '.join(cells)}."


def per_step(run: Found) -> float:
    """Tokens of all requests in a step."""
    return float(run["mean_batch"] * run["mean_acceptance_length"])


def fixed_lengths(runs: Runs) -> tuple[str, ...]:
    """The pipelined ones."""
    return tuple(name for name in runs.variants if name.startswith("s=") and " " not in name)


def over_best(runs: Runs, name: str) -> str:
    """Throughput over that of the best fixed length."""
    best = max(fixed_lengths(runs), key=runs.throughput)
    return f"{runs.throughput(name) / runs.throughput(best):.3f} of {best}"


def slower(runs: Runs, name: str) -> str:
    """The fixed lengths that have more throughput; empty where none has."""
    faster = [length for length in fixed_lengths(runs) if runs.throughput(length) > runs.throughput(name)]
    return f"slower than {' and '.join(faster)}" if faster else ""


def shape(found: Found) -> str:
    """How the paper's time changes with the length, and whether ours does so."""
    runs = Runs(found)
    times = [runs.latency(name) for name in fixed_lengths(runs)]
    place = times.index(min(times))
    down, up = times[: place + 1], times[place:]
    same = 0 < place < len(times) - 1 and down == sorted(down, reverse=True) and up == sorted(up)
    return f"Its time falls, then rises with s (2.3){', as ours does' if same else ''}."
