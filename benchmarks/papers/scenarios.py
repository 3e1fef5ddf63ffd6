"""Simulated figures: scenarios that are run here and stored, read by variant and load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import ROOT
from benchmarks.papers.common import How
from benchmarks.papers.sources import Found, Source
from cospec.simulation.run import simulate
from cospec.simulation.scenario import Scenario

FOLDER = ROOT / "examples" / "scenarios"
RECORDING = FOLDER / "zoo-drafts.npz"


def scenario(name: str) -> Source:
    """``examples/scenarios/<name>.yaml``; stored figures of a scenario that has changed since do not count."""

    def read() -> Scenario:
        return Scenario.read(FOLDER / f"{name}.yaml")

    def fresh(found: Found) -> bool:
        return bool(found["scenario"] == described(read()))

    command = f"cospec simulate examples/scenarios/{name}.yaml"
    return Source(f"simulations/{name}", command, How.SIMULATED, lambda: simulated(read()), fresh)


def simulated(given: Scenario) -> Found:
    """All runs, without their series over time."""
    found = simulate(given, FOLDER)
    runs = [{key: value for key, value in run.items() if key != "series"} for run in found["runs"]]
    return {"scenario": described(given), "runs": runs}


def described(given: Scenario) -> Mapping[str, Any]:
    """A scenario as its results hold it, without the words about it."""
    dumped = given.model_dump(mode="json", exclude_defaults=True)
    return {key: value for key, value in dumped.items() if key != "description"}


def inputs() -> str:
    """Words on the prompts of the recorded drafts."""
    lengths = np.load(RECORDING)["lengths"][:, 0]
    return (
        f"Inputs have {lengths.min()} to {lengths.max()} tokens, {lengths.mean():.0f} in the mean, and outputs 64; the "
        "paper's have 256 and 128 (6.1)."
    )


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs by variant and load."""

    found: Found

    @property
    def loads(self) -> tuple[float, ...]:
        """In the order of the scenario."""
        return tuple(dict.fromkeys(float(run["load"]) for run in self.found["runs"]))

    @property
    def variants(self) -> tuple[str, ...]:
        """In the order of the scenario."""
        return tuple(dict.fromkeys(run["variant"] for run in self.found["runs"]))

    def at(self, variant: str, load: float | None = None) -> Mapping[str, Any]:
        """One run; of the only load where none is named.

        Raises:
            KeyError: there is none.
        """
        for run in self.found["runs"]:
            if run["variant"] == variant and load in (None, run["load"]):
                return dict(run)
        raise KeyError(variant)

    def latency(self, variant: str, load: float | None = None) -> float:
        """Mean seconds of a request."""
        return float(self.at(variant, load)["latency"]["mean"])

    def throughput(self, variant: str, load: float | None = None) -> float:
        """Tokens per second."""
        return float(self.at(variant, load)["throughput"])

    def served(self, variant: str) -> float:
        """The most requests per second that a variant served at any load."""
        return max(float(self.at(variant, load)["requests_per_second"]) for load in self.loads)

    def price(self, variant: str, load: float | None = None) -> float:
        """Price of a million tokens.

        Raises:
            KeyError: the scenario has no prices.
        """
        return float(self.at(variant, load)["price_per_million_tokens"])

    def forward(self, variant: str, load: float | None = None) -> float:
        """Mean seconds of a forward of the target.

        Raises:
            KeyError: the stored runs have no idle time.
        """
        return 1.0 / self._parts(variant, load)[3]

    def by_parts(self, variant: str, other: str, load: float | None = None) -> str:
        """Throughput over that of another variant, as the exact product of its parts.

        Throughput is tokens of a request and step, times requests of a step, times the share of time in which the
        target works, times forwards per second of this time.

        Raises:
            KeyError: the stored runs have no idle time.
        """
        (tokens, batch, works, speed), others = self._parts(variant, load), self._parts(other, load)
        cells = (
            f"{tokens / others[0]:.2f}× tokens of a request and step",
            f"{batch / others[1]:.2f}× requests of a step",
            f"{works / others[2]:.2f}× working time of the target",
            f"{speed / others[3]:.2f}× forwards in this time",
        )
        return f"{self.throughput(variant, load) / self.throughput(other, load):.2f}× = {' · '.join(cells)}"

    def _parts(self, variant: str, load: float | None) -> tuple[float, float, float, float]:
        run = self.at(variant, load)
        works, batch = 1.0 - run["target_idle"], run["mean_batch"]
        forwards = run["rounds"] / (run["seconds"] * works)
        return run["throughput"] / (batch * works * forwards), batch, works, forwards
