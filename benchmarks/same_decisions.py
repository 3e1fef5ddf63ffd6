"""Draft lengths and latencies of goodput in this checkout and another, in the other checkout's simulated loads.

Run ``python -m benchmarks.same_decisions CHECKOUT``. Each checkout runs its own simulator, on the scenarios of the
other checkout, with the same seeds. Simulated clocks make the comparison free of the machine's noise. A row has the
mean draft length of both, and the ratio of the mean latencies and of the 99th percentiles, this checkout over the
other: medians over the seeds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import ROOT, write
from benchmarks.same_outputs import commit, environment, named

SEEDS = 5
WORKER = """
import json, sys
from cospec.simulation.run import simulate
from cospec.simulation.scenario import Scenario
print(json.dumps([simulate(Scenario.model_validate(each))["runs"] for each in json.load(sys.stdin)]))
"""
RENAMED = {"round": "execution_mode"}  # options of the other checkout, by their names here


def learns(variant: dict[str, Any]) -> bool:
    """Whether goodput decides in a variant of a scenario, as under ``auto`` without a number of tokens."""
    policy = variant.get("policy", "auto")
    unset = policy == "auto" and variant.get("num_speculative_tokens", "auto") == "auto"
    return unset or bool(policy == "goodput")


def renamed(part: Any) -> Any:
    """Return a part of a scenario with the names of this checkout."""
    if isinstance(part, dict):
        return {RENAMED.get(key, key): renamed(value) for key, value in part.items()}
    return [renamed(each) for each in part] if isinstance(part, list) else part


def scenarios(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the scenarios of a folder with the variants in which goodput decides, by name."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        scenario = yaml.safe_load(path.read_text("utf-8"))
        scenario["variants"] = [each for each in scenario["variants"] if learns(each)]
        if scenario["variants"]:
            found[path.stem] = scenario
    return found


def runs(checkout: Path, given: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the runs of each scenario in a checkout's simulator."""
    command = [sys.executable, "-c", WORKER]
    done = subprocess.run(
        command, input=json.dumps(given), text=True, capture_output=True, env=environment(checkout), check=False
    )
    if done.returncode:
        raise SystemExit(f"the simulator of {checkout} failed: {done.stderr.strip().splitlines()[-1]}")
    found: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the smallest and the largest value."""
    return {"ratio": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> None:
    """Compare and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--scenarios", nargs="*", help="names without .yaml; all by default")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    rows = []
    for name, scenario in scenarios(given.checkout / "examples" / "scenarios").items():
        if given.scenarios and name not in given.scenarios:
            continue
        seeded = [scenario | {"seed": scenario["seed"] + number} for number in range(given.seeds)]
        pairs = zip(runs(given.checkout, seeded), runs(ROOT, [renamed(each) for each in seeded]), strict=True)
        cells: dict[tuple[str, float], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for other, own in pairs:
            for before, now in zip(other, own, strict=True):
                cells.setdefault((now["variant"], now["load"]), []).append((before, now))
        for (variant, load), both in cells.items():
            row = {"scenario": name, "variant": variant, "load": load, "seeds": given.seeds}
            row["length_before"] = statistics.mean(before["mean_k"] for before, _ in both)
            row["length"] = statistics.mean(now["mean_k"] for _, now in both)
            for measure in ("mean", "p99"):
                ratios = [now["latency"][measure] / before["latency"][measure] for before, now in both]
                row[measure] = spread(ratios)
            rows.append(row)
            print(
                "{scenario:20} {variant:20} {load:6g} {length_before:6.2f} {length:6.2f} ".format(**row),
                " ".join("{ratio:.3f} [{low:.3f}, {high:.3f}]".format(**row[each]) for each in ("mean", "p99")),
                flush=True,
            )
    sys.argv = named(given.checkout)
    write("same_decisions", {"other_commit": commit(given.checkout), "rows": rows})


if __name__ == "__main__":
    main()
