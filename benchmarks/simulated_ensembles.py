"""Simulated speed of ensembles, compared with the measured speed of ``benchmarks.collaborative``.

Run ``python -m benchmarks.simulated_ensembles``. Each stored row gives the inputs: the acceptance of each member's
proposals, the ratio of forward times, the schedule that the policy chose, and the batch. The target's stored time model
(``cospec profile``) gives the time by tokens. A simulation of these inputs gives speed over ``standard``, which the row
measured apart. Forwards alone take simulated time, so the engine's own work per turn is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.common import ROOT, write
from cospec.plugin_options import parse
from cospec.simulation.run import simulate
from cospec.simulation.scenario import Scenario

RESULTS = ROOT / "benchmarks" / "results"
TARGET = {"profile": "profile.json", "model": "zoo"}
Row = dict[str, Any]


def main() -> None:
    """Simulate each measured row, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", default="collaborative")
    parser.add_argument("--requests", type=int, default=16, help="of each simulation")
    parser.add_argument("--name", default="simulated_ensembles")
    options = parser.parse_args()
    measured = json.loads((RESULTS / f"{options.measured}.json").read_text(encoding="utf-8"))
    rows = [
        {"setting": name, **compare(row, options.requests, measured["options"]["tokens"])}
        for name, found in measured["settings"].items()
        for row in found
        if row.get("theory", {}).get("form") in ("naive", "alternate")
    ]
    for row in rows:
        print(*row.values())
    errors = {kind: [abs(row[kind] / row["measured"] - 1) for row in rows] for kind in ("simulated", "process")}
    found = {kind: round(statistics.median(each), 3) for kind, each in errors.items()}
    print("median error", found)
    print("written to", write(options.name, {"options": vars(options), "rows": rows, "median_error": found}))


def compare(row: Mapping[str, Any], requests: int, tokens: int) -> Row:
    """Return the measured and the simulated speed of one row, and the prediction of the exact process."""
    theory, batch = row["theory"], row["batch"]
    variants = {"standard": {"proposal": "standard"}, "own": schedule(theory)}
    given = {
        "requests": requests,
        "target": {"cost": TARGET, "members": members(theory)},
        "domains": [{"prompt": {"mean": 1}, "output": {"mean": tokens}}],
        "arrivals": {"kind": "closed", "concurrency": [batch]},
        "variants": [{"name": name, "collaboration": own} for name, own in variants.items()],
    }
    standard, own = simulate(parse(Scenario, given), RESULTS)["runs"]
    return {
        "batch": batch,
        "temperature": row["temperature"],
        "domain": row["domain"],
        "measured": row["over_standard"]["alternate"][0],
        "interval": row["over_standard"]["alternate"][1:],
        "simulated": round(own["throughput"] / standard["throughput"], 2),
        "process": theory["alternate process"],
    }


def schedule(theory: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the proposals that the measured engine chose."""
    gammas = [max(1, gamma) for gamma in theory["gammas"]]
    return {"proposal": theory["form"], "gamma": gammas, "proposer": theory["proposer"]}


def members(theory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the members: scorers of equal time, of which the proposer's time is ``c`` of all."""
    alphas, proposer = theory["alpha"], theory["proposer"]
    share = theory["c"] * (len(alphas) - 1)
    return [
        {"name": str(number), "acceptance": alpha, "cost": {**TARGET, "factor": share if number == proposer else 1.0}}
        for number, alpha in enumerate(alphas)
    ]


if __name__ == "__main__":
    main()
