"""The figures of ``README.md`` and the headlines of the reports, read from the stored results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common import ROOT

Found = Mapping[str, Any]
SYSTEMS = ("generate", "assisted", "batching", "off", "draft-4", "ngram-4", "auto")
LOADS = {
    "bf16": "load_2-x-amd-epyc_avx512_bf16",
    "AVX-512": "load_2-x-amd-epyc_avx512",
    "AVX2": "load_2-x-amd-epyc_avx2",
    "AVX2 alone": "load_2-x-amd-epyc-family-25-model-1_avx2",
}


def stored(name: str) -> Found:
    """One file of results."""
    found: Found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def summary() -> str:
    """Tokens per second of each system, one request at a time and eight at once, with all and with AVX2 kernels."""
    files = [f"compare_batch{size}{kernels}" for kernels in ("", "_avx2") for size in (1, 8)]
    columns = [{run["label"]: run for run in stored(name)["runs"]} for name in files]
    lines = [
        "| system | one at a time, tokens/s | eight at once, tokens/s | one at a time, AVX2 | eight at once, AVX2 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in SYSTEMS:
        cells = [f"{runs[name]['output_throughput']:.0f}" if name in runs else "" for runs in columns]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    machine = stored("compare_batch1")["machine"]
    kernels = f"kernels {machine['kernels']} and avx2, torch {machine['torch']}"
    return "\n".join([*lines, "", f"{machine['processor']}, {machine['cores']} cores, {kernels}.", ""])


def headlines() -> str:
    """One table: what was measured, the figure, the command, the report."""
    lines = ["| measurement | figure | command | report |", "| --- | --- | --- | --- |"]
    for what, figure, command, report in _rows():
        lines.append(f"| {what} | {figure} | `{command}` | [{report}]({report}.md) |")
    return "\n".join([*lines, ""])


def decision_ms(row: Found) -> float:
    """Milliseconds of one new decision of a policy, from its mean over all steps."""
    return float(row["plan_us"] / row["decisions"] / 1e3)


def decision_shares(rows: Sequence[Found]) -> str:
    """Shares of the steps with a new decision."""
    least, most = (f"{find(row['decisions'] for row in rows):.1%}" for find in (min, max))
    return least if least == most else f"{least} to {most}"


def _rows() -> Iterator[tuple[str, str, str, str]]:
    for size, times in ((1, "one request at a time"), (8, "eight requests at once")):
        for other, name in (("generate", "transformers"), ("off", "no speculation")):
            figure = _compared(f"compare_batch{size}", "auto", other)
            yield f"speed of the default over {name}, {times}", figure, "cospec bench compare", "compare"
    for size, times in ((1, "one request at a time"), (8, "eight requests at once")):
        for other, name in (("llama", "llama.cpp"), ("vllm", "vLLM on a CPU")):
            figure = _compared(f"servers_batch{size}", "cospec", other)
            yield f"speed of the server over {name}, float32, {times}", figure, "cospec bench compare", "servers"
    for kernels, file in LOADS.items():
        rows = stored(file)["rows"]
        for key, other in (("auto_over_best", "the best other configuration"), ("auto_over_off", "no speculation")):
            found = [row[key]["mean"] for row in rows]
            figure = ", ".join(f"{row['rate']:g}/s: {_ratio(cell)}" for row, cell in zip(rows, found, strict=True))
            what = f"mean latency under load of the default over {other}, kernels {kernels}"
            yield what, figure, "python -m benchmarks.load", "load"
    pools = stored("pool")
    trees = [row for row in pools["same_nodes"] if row["workload"] == "mixed"]
    for combiner in dict.fromkeys(row["combiner"] for row in trees):
        figure = _by_temperature([row for row in trees if row["combiner"] == combiner], "best tree")
        what = f"acceptance length of pool `{combiner}` over the best drafter's tree"
        yield what, figure, "python -m benchmarks.pool", "pool"
    blended = [row for row in stored("collaborative")["settings"]["weighted-two"] if row["domain"] == "all"]
    for size in dict.fromkeys(row["batch"] for row in blended):
        rows = [{**row, **row["over_standard"]} for row in blended if row["batch"] == size]
        what = f"speed of two blended models over standard decoding, batch {size}"
        yield what, _by_temperature(rows, "alternate"), "python -m benchmarks.collaborative", "ensembles"
    for size, modes in stored("pipelining")["batches"].items():
        mode = modes["pipelined, thread"]
        figure = _interval([mode["speed"], *mode["speed_interval"]])
        what = f"speed of `pipelined` over `sequential` on two shared cores, batch {size}"
        yield what, figure, "python -m benchmarks.pipelining", "execution_modes"
    shares = [row["share"] for row in stored("overhead")["rows"] if not row["system"].startswith("ngram")]
    figure = f"{min(shares):.1%} to {max(shares):.1%}"
    yield "share of a step outside of the models, bf16", figure, "python -m benchmarks.overhead", "roofline"
    decided = [row for row in stored("policy_cost")["rows"] if row["policy"] == "goodput"]
    costs, single = [row["share"] for row in decided], [decision_ms(row) for row in decided]
    shares = [decision_ms(row) / row["round_ms"] for row in decided]
    figure = (
        f"{min(costs):.1%} to {max(costs):.1%}; a single decision {min(single):.2f} to {max(single):.2f} ms, "
        f"{min(shares):.0%} to {max(shares):.0%} of a step"
    )
    often = f"with a new decision in {decision_shares(decided)} of the steps"
    what = f"share of a step that `goodput` takes to decide, {often}"
    yield what, figure, "python -m benchmarks.policy_cost", "policies"
    median = stored("fidelity")["median"]["error"]
    figure = f"{median['mean']:.1%} (mean), {median['p99']:.1%} (p99)"
    given = "given the arrivals, the output lengths, the right guesses, and the machine's speed in the run next to it"
    yield f"median error of a simulated latency, {given}", figure, "python -m benchmarks.fidelity", "simulation"


def _compared(name: str, system: str, baseline: str) -> str:
    rows = [row for row in stored(name)["ratios"] if (row["system"], row["baseline"]) == (system, baseline)]
    return _ratio(next(row for row in rows if row["cost"] == "time_per_token"))


def _by_temperature(rows: Sequence[Found], key: str) -> str:
    return ", ".join(f"T = {row['temperature']:g}: {_interval(row[key])}" for row in rows)


def _ratio(row: Found) -> str:
    return _interval((row["ratio"], row["low"], row["high"]))


def _interval(values: Any) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*values)
