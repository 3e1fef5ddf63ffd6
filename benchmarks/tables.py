"""Tables from the stored results: one function for each kind of measurement.

``block(NAME)`` gives the command, the table, and the machine of ``benchmarks/results/NAME.json``;
``benchmarks/pages.py`` puts the blocks into pages.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence

from benchmarks import gpu_tables, pool_tables, weight_tables
from benchmarks.common import ROOT
from benchmarks.table_lines import Found, heading, interval, line

DATA = " ".join(f"--dataset-path examples/data/{name}.jsonl" for name in ("code", "math", "prose"))
OURS = """'off={"speculative_config": {"method": "off"}}'
'draft-4={"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4}}'
'ngram-4={"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}' auto=cospec"""
AUTO_AVX2 = """'auto={"instruction_set": "avx2"}'"""
AVX2 = OURS.replace("={", '={"instruction_set": "avx2", ').replace("auto=cospec", AUTO_AVX2)
ONE_REQUEST = f"{DATA} --num-prompts 9 --repetitions 2 --output-len 64"
EIGHT_REQUESTS = f"{DATA} --batch-size 8 --num-prompts 24 --output-len 64"
ONE = f"generate=transformers assisted=transformers-assisted lookup=transformers-lookup {OURS}"
EIGHT = f"generate=transformers batching=transformers-continuous {OURS}"
SLOPE = """'off={"speculative_config": {"method": "off"}}'
'draft-4={"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4}}'
'slope={"speculative_config": {"method": "draft_model", "policy": "slope", "num_speculative_tokens": 8}}' auto=cospec"""
EIGHT_TOKENS = """'off={"speculative_config": {"method": "off"}}'
'draft-8={"speculative_config": {"method": "draft_model", "policy": "fixed", "num_speculative_tokens": 8}}'"""
COMMANDS = {
    "compare_batch1": f"bench compare {ONE} {ONE_REQUEST}",
    "compare_batch8": f"bench compare {EIGHT} {EIGHT_REQUESTS}",
    "compare_batch1_avx2": f"bench compare {AVX2} {ONE_REQUEST}",
    "compare_batch8_avx2": f"bench compare {AVX2} {EIGHT_REQUESTS}",
    "compare_slope_batch1": f"bench compare {SLOPE} {ONE_REQUEST}",
    "compare_slope_batch8": f"bench compare {SLOPE} {EIGHT_REQUESTS}",
    "compare_draft8_t1": f"bench compare {EIGHT_TOKENS} {ONE_REQUEST} --temperature 1",
    "roofline": "bench roofline zoo",
    "roofline_fp32": "bench roofline zoo --dtype float32",
}
# Systems that others are compared with, where a comparison has them.
BASELINES = ("generate", "assisted", "batching", "llama", "vllm", "off")


def compared(found: Found) -> Iterator[str]:
    """Speeds, ratios to the baselines with their intervals, and acceptance lengths."""
    names = [run["label"] for run in found["runs"]]
    against = [name for name in BASELINES if name in names]
    ratios = {(row["system"], row["baseline"]): row for row in found["ratios"] if row["cost"] == "time_per_token"}
    yield from heading("", "tokens/s", *(f"× {name}" for name in against), "acceptance length", "same text")
    for run in found["runs"]:
        cells = [interval(ratios.get((run["label"], name))) for name in against]
        length = run["speculation"].get("mean_acceptance_length")
        same = run.get("same_text")
        yield line(
            f"`{run['label']}`",
            f"{run['output_throughput']:.0f}",
            *cells,
            "" if length is None else f"{length:.2f}",
            "" if same is None else f"{same:.0%}",
        )


def roofline(found: Found) -> Iterator[str]:
    """Return bytes and time per committed token, and the shares of the device's limits."""
    device = found["roofline"]
    speeds = (device["bytes_per_s"] / 1e9, device["flops_per_s"] / 1e9)
    yield "Memory read at {:.0f} GB/s, products at {:.0f} GFLOP/s.\n".format(*speeds)
    yield from heading("", "MB / token", "least ms / token", "ms / token", "share, forwards", "share, all")
    for run in found["runs"]:
        times = [run[key] for key in ("megabytes_per_token", "floor_ms_per_token", "ms_per_token")]
        shares = [f"{run[key]:.0%}" for key in ("share_of_target", "share_of_step")]
        yield line(run["label"], *(f"{value:.2f}" for value in times), *shares)


def forwards(found: Found) -> Iterator[str]:
    """The forward of cospec and the forward of llama.cpp."""
    yield from heading("weights", "rows", "llama.cpp, ms", "cospec, ms", "times as fast")
    for row in found["rows"]:
        times = [f"{row[key]:.2f}" for key in ("theirs_ms", "ours_ms")]
        yield line(row["weights"], str(row["rows"]), *times, interval(row))


def overhead(found: Found) -> Iterator[str]:
    """Time of a step, and the part outside of the models' forwards."""
    yield from heading("", "batch", "temperature", "ms / step", "engine", "share")
    for row in found["rows"]:
        times = [f"{row[key]:.2f}" for key in ("round_ms", "engine_ms")]
        yield line(row["system"], str(row["batch"]), str(row["temperature"]), *times, f"{row['share']:.1%}")


def collaborative(found: Found) -> Iterator[str]:
    """Speeds over standard collaborative decoding on all domains; then predicted and measured speeds."""
    rows = [(name, row) for name, rows in found["settings"].items() for row in rows]
    methods = list(dict.fromkeys(name for _, row in rows for name in row["over_standard"] if name != "standard"))
    whole = ["prompts too"] if "with_prompts" in rows[0][1] else []
    yield from heading("", "batch", "T", *(f"`{name}`" for name in methods), *whole)
    for name, row in rows:
        if row["domain"] == "all":
            own = row["over_standard"]
            ratios = ["{:.2f} ({:.2f} to {:.2f})".format(*own[method]) if method in own else "" for method in methods]
            ratios += ["{:.2f}".format(row["with_prompts"]["alternate"][0]) for _ in whole]
            yield line(f"`{name}`", str(row["batch"]), f"{row['temperature']:g}", *ratios)
    yield "\nOne request at a time, predicted and measured:\n"
    kinds = (("naive", "theorem 3.1"), ("alternate", "theorem 3.6"))
    heads = [head for kind, theorem in kinds for head in (theorem, f"`{kind}`, process", "measured")]
    yield from heading("", "T", "domain", "α of each", "bound", *heads)
    for name, row in rows:
        if row["batch"] == 1 and (said := row.get("theory")):
            cells = []
            for kind, theorem in kinds:
                values = [said[theorem] if applies(said, kind) else None, said[f"{kind} process"]]
                cells += ["" if each is None else f"{each:.2f}" for each in (*values, said[f"{kind} measured"])]
            bound = ", ".join(f"{each:.2f}" for each in said.get("bound", ()))
            yield line(f"`{name}`", f"{row['temperature']:g}", row["domain"], estimated_acceptance(said), bound, *cells)


def applies(theory: Found, kind: str) -> bool:
    """Whether the theorem about ``kind`` is about such models: two, which alternate in theorem 3.6."""
    return len(theory["gammas"]) == 2 and (kind == "naive" or theory["form"] == kind)


def estimated_acceptance(theory: Found) -> str:
    """The estimated acceptance of each model; a model that never proposed has none."""
    pairs = zip(theory["alpha"], theory["gammas"], strict=True)
    return ", ".join(f"{alpha:.2f}" if gamma else "none" for alpha, gamma in pairs)


def simulated_ensembles(found: Found) -> Iterator[str]:
    """Measured and simulated speed over standard decoding, by setting, batch and temperature."""
    if other_run(found["rows"], stored(found["options"]["measured"])["settings"]):
        yield "*Measured* here is a run of its own, and not that of the tables above.\n"
    yield from heading("", "batch", "T", "domain", "measured", "simulated", "process")
    for row in found["rows"]:
        measured = "{:.2f} ({:.2f} to {:.2f})".format(row["measured"], *row["interval"])
        figures = [f"{row[key]:.2f}" for key in ("simulated", "process")]
        yield line(
            f"`{row['setting']}`", str(row["batch"]), f"{row['temperature']:g}", row["domain"], measured, *figures
        )
    errors = found["median_error"]
    yield f"\nMedian error: simulated {errors['simulated']:.1%}, process {errors['process']:.1%}."


def other_run(rows: Sequence[Found], settings: Found) -> bool:
    """Whether the measured speeds are not those of the stored run of ensembles, which may be newer."""
    keys = ("batch", "temperature", "domain")
    now = {
        (name, *(row[key] for key in keys)): row["over_standard"]["alternate"][0]
        for name, found in settings.items()
        for row in found
    }
    return any(now.get((row["setting"], *(row[key] for key in keys))) != row["measured"] for row in rows)


def load(found: Found) -> Iterator[str]:
    """Latency by request rate, and ratios of ``auto`` to the other configurations.

    The last column is the median over turns of ``auto`` over the best other configuration.
    """
    names = list(found["rows"][0]["latency"])
    kinds = {
        "auto_over_best": "over the best",
        "auto_over_chosen": "over the chosen",
        "auto_over_off": "over `off`",
        "control": "control",
    }
    over = [key for key in kinds if key in found["rows"][0]]
    heads = [head for key in over for head in (kinds[key], "p99")]
    turns = ["median of turns"] if "paired" in found["rows"][0] else []
    yield from heading("requests/s", *(f"`{name}` mean / p99, ms" for name in names), *heads, *turns)
    for row in found["rows"]:
        latencies = ["{mean:.0f} / {p99:.0f}".format_map(_milliseconds(row["latency"][name])) for name in names]
        ratios = [interval(row[key][measure]) for key in over for measure in ("mean", "p99")]
        ratios += [interval(row["paired"]) for _ in turns]
        yield line(f"{row['rate']:g}", *latencies, *ratios)


def pipelining(found: Found) -> Iterator[str]:
    """Each execution mode over ``sequential``, for each batch size."""
    batches = found["batches"]
    heads = [head for size in batches for head in (f"{size} at once: over sequential", "overlap")]
    yield from heading("execution mode, drafter executor", *heads)
    for way in next(iter(batches.values())):
        cells: list[str] = []
        for row in (ways[way] for ways in batches.values()):
            shown_ratio = "{:.2f} ({:.2f} to {:.2f})".format(row["speed"], *row["speed_interval"])
            cells += [f"{row['tokens_per_second']:.0f} tokens/s" if way == "sequential" else shown_ratio]
            cells += [f"{row['overlap']:.2f}"]
        yield line(way, *cells)


def node_overhead(found: Found) -> Iterator[str]:
    """Time of a round without the time of the drafter, and how much more a node takes than a process."""
    yield from heading("drafter", "requests", "executor", "ms per round", "ms without drafting", "ms over a process")
    process = {(row["drafter"], row["batch"]): row for row in found["rows"] if row["executor"] == "process"}
    for row in found["rows"]:
        least = process[row["drafter"], row["batch"]]["overhead"]
        more = "" if row["executor"] == "process" else f"{1e3 * (row['overhead'] - least):.2f}"
        times = [f"{1e3 * row[name]:.2f}" for name in ("seconds", "overhead")]
        yield line(f"`{row['drafter']}`", str(row["batch"]), row["executor"], *times, more)


def node_links(found: Found) -> Iterator[str]:
    """Throughput of pools on drafter nodes, and the idle share of the target, by the delay of the links."""
    variants = {
        (name.removesuffix(f", {row['link_delay_ms']:g} ms"), row["link_delay_ms"]): row
        for name, row in found["variants"].items()
    }
    delays = sorted({delay for _, delay in variants})
    heads = [head for delay in delays for head in (f"tokens/s, {delay:g} ms", "target idle")]
    yield from heading(f"{found['requests']} requests", *heads)
    for name in dict.fromkeys(name for name, _ in variants):
        rows = [variants[name, delay] for delay in delays]
        figures = [(f"{row['tokens_per_second']:.0f}", f"{row['target_idle']:.0%}") for row in rows]
        yield line(name, *(cell for pair in figures for cell in pair))


def heads(found: Found) -> Iterator[str]:
    """Accuracy of each head by rank; full trees and sparse trees of as many nodes."""
    accuracy = found["accuracy"]
    yield "Right among the first guesses, on the target's held-out text:\n"
    yield from heading("head", *map(str, range(1, len(accuracy[0]) + 1)))
    for number, ranks in enumerate(accuracy, start=1):
        yield line(str(number), *(f"{sum(ranks[:width]):.1%}" for width in range(1, len(ranks) + 1)))
    yield "\nAcceptance lengths of trees:\n"
    yield from heading("T", "nodes", "widths", "full", "sparse, as deep", "sparse")
    for kind, temperature in found["temperatures"].items():
        cells = {
            name: "{:.2f} ({:.2f} to {:.2f})".format(*row["acceptance_length"]) for name, row in found[kind].items()
        }
        for name in (name for name in cells if name.startswith("full ")):
            widths, nodes = name.removeprefix("full ").removesuffix(")").split(" (")
            sparse = (f"sparse ({nodes}), as deep as {widths}", f"sparse ({nodes})")
            yield line(f"{temperature:g}", nodes, widths, cells[name], *(cells[each] for each in sparse))


def same_speed(found: Found) -> Iterator[str]:
    """Time of this checkout over the time of an earlier commit."""
    yield from heading("mode", "configuration", "load", "turns", f"time over {found.get('other_commit', 'the commit')}")
    for row in found["rows"]:
        mode, configuration, *load = row["cell"].split(", ")
        yield line(mode, f"`{configuration}`", ", ".join(load), str(row["turns"]), interval(row))


def same_decisions(found: Found) -> Iterator[str]:
    """Draft lengths of goodput in two checkouts, and ratios of their simulated latencies."""
    other = found["other_commit"]
    yield from heading(
        "scenario", "variant", "load", f"tokens a draft, {other}", "now", "mean latency", "99th percentile"
    )
    for row in found["rows"]:
        lengths = [f"{row[key]:.2f}" for key in ("length_before", "length")]
        ratios = [interval(row[key]) for key in ("mean", "p99")]
        yield line(row["scenario"], f"`{row['variant']}`", f"{row['load']:g}", *lengths, *ratios)


def policy_cost(found: Found) -> Iterator[str]:
    """Time of planning and learning, and their share of a step."""
    yield from heading("policy", "batch", "plan, µs", "learn, µs", "step, ms", "share of the step")
    for row in found["rows"]:
        times = [f"{row[key]:.1f}" for key in ("plan_us", "observe_us", "round_ms")]
        yield line(f"`{row['policy']}`", str(row["batch"]), *times, f"{row['share']:.2%}")


BASES = {"default", "goodput", "limit of 8", "usual acceptance limit of 8"}


def policy_gain(found: Found) -> Iterator[str]:
    """Gains of options over the default, in the engine by requests per second, in a scenario by requests at a time."""
    yield from heading("where", "load", "variant", "gain")
    for row in found["rows"]:
        if row["variant"] not in BASES or row["low"] < row["high"]:  # a default has a gain of exactly 1
            gain = f"{row['gain']:.3f}× ({row['low']:.3f} to {row['high']:.3f})"
            yield line(row["where"], f"{row['load']:g}", f"`{row['variant']}`", gain)


def fidelity(found: Found) -> Iterator[str]:
    """Latencies of the engine, and the relative error of the simulator and of a second run of the engine."""
    heads = [
        f"{name}, {measure}" for measure in ("mean", "p99") for name in ("measured, ms", "simulator", "second run")
    ]
    yield from heading("requests/s", "configuration", *heads)
    for row in found["rows"]:
        cells: list[str] = []
        for measure in ("mean", "p99"):
            cells += [f"{1e3 * row['measured'][measure]:.0f}"]
            cells += [f"{row[kind][measure]:+.1%}" for kind in ("error", "again")]
        yield line(f"{row['rate']:g}", f"`{row['config']}`", *cells)


def second_implementations(found: Found) -> Iterator[str]:
    """Speed of each native implementation over its readable twin."""
    from benchmarks.second_implementations import why_it_stays  # imports torch, which no other table needs

    ratios: dict[str, dict[int, float]] = {}
    for row in found["rows"]:
        ratios.setdefault(row["name"], {})[row["batch"]] = row["ratio"]
    heads = ("pair", "batch", "temperature", "native over readable", "turns", "tokens", "why the native part stays")
    yield from heading(*heads)
    for row in found["rows"]:
        counts, why = [str(row[key]) for key in ("turns", "tokens")], why_it_stays(row["name"], ratios[row["name"]])
        yield line(row["name"], str(row["batch"]), f"{row['temperature']:g}", interval(row), *counts, why)


TABLES: dict[str, Callable[[Found], Iterator[str]]] = {
    "compare": compared,
    "servers": compared,
    "roofline": roofline,
    "llamacpp": forwards,
    "overhead": overhead,
    "load": load,
    "collaborative": collaborative,
    "simulated_ensembles": simulated_ensembles,
    "pipelining": pipelining,
    "cosine": node_links,
    "node_overhead": node_overhead,
    "pool": pool_tables.pool,
    "pool_one": pool_tables.pool_one,
    "pool_one_alone": pool_tables.pool_one,
    "heads": heads,
    "gguf": weight_tables.gguf,
    "peers": weight_tables.peers,
    "weight_bandwidth": weight_tables.weight_bandwidth,
    "load_time": weight_tables.load_time,
    "attention": weight_tables.attention,
    "prompt_products": weight_tables.prompt_products,
    "gguf_server": weight_tables.gguf_server,
    "same": same_speed,
    "same_decisions": same_decisions,
    "policy_cost": policy_cost,
    "second_implementations": second_implementations,
    "policy_gain": policy_gain,
    "fidelity": fidelity,
    "gpu": gpu_tables.gpu,
}


def stored(name: str) -> Found:
    """One file of results."""
    found: Found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def block(name: str) -> str:
    """Return the command, the table, and the place and time of the measurement."""
    found = stored(name)
    machine = found["machine"]
    date = (found.get("date") or machine["date"])[:10]
    about = [f"{machine[key]} {key}" for key in ("cores", "threads") if key in machine]
    about += [f"{key} {machine[key]}" for key in ("kernels", "torch") if key in machine]
    command = found.get("command", f"python -m benchmarks.{name}")
    kind = max((kind for kind in TABLES if name.startswith(kind)), key=len)
    lines = [*_wrapped(command), *TABLES[kind](found)]
    place = f"{found['device']['name']} with " if "device" in found else ""
    return "\n".join([*lines, "", f"{place}{machine['processor']}, {', '.join(about)}; {date}.", ""])


def _wrapped(command: str) -> Iterator[str]:
    """A command as a code block, without the options of its result file; an option and its value share a line."""
    shown = re.sub(r" --result-(dir|filename) \S+", "", command)
    lines = [""]
    for part in re.split(r" (?=--)", shlex.join(shlex.split(shown))):
        for word in [part] if part.startswith("--") else map(shlex.quote, shlex.split(part)):
            if lines[-1] and len(lines[-1]) + len(word) > 112:
                lines.append("   ")
            lines[-1] += (" " if lines[-1] else "") + word
    yield from ("", "```sh", " \\\n".join(lines), "```", "")


def _milliseconds(seconds: Found) -> dict[str, float]:
    return {key: 1e3 * value for key, value in seconds.items()}
