"""Latency over load: where each length stops paying, and how near an adaptive one comes to the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

BASE = "off"


@dataclass(frozen=True, slots=True)
class Curves:
    """Mean latency in seconds by load and way of serving; ``off`` is the baseline, fixed lengths are ``k=N``."""

    latency: Mapping[float, Mapping[str, float]]
    adaptive: str

    @property
    def fixed(self) -> list[str]:
        """The fixed lengths, shortest first."""
        names = {name for at in self.latency.values() for name in at if name.startswith("k=")}
        return sorted(names, key=lambda name: int(name[2:]))

    def speedup(self, name: str, load: float) -> float:
        """Latency without speculation over that of ``name``."""
        return self.latency[load][BASE] / self.latency[load][name]

    def fastest_fixed(self, load: float) -> str:
        """Which fixed length is best at a load, and by how much."""
        best = max(self.fixed, key=lambda name: self.speedup(name, load))
        return f"{best} ({self.speedup(best, load):.2f}×) at {load:g}/s"

    def stops(self, name: str) -> str:
        """The rate from which on a length is not faster; every later speedup where it is faster again."""
        loads = sorted(self.latency)
        found = {load: self.speedup(name, load) for load in loads}
        losses = [load for load in loads if found[load] <= 1.0]
        if not losses:
            return f"never up to {loads[-1]:g}/s"
        later = [load for load in loads if load >= losses[0]]
        if len(later) > len(losses):
            return "no single rate: " + ", ".join(f"{found[load]:.2f}× at {load:g}/s" for load in later)
        return f"from {later[0]:g}/s (down to {min(found[load] for load in later):.2f}×)"

    def loses_from(self, name: str) -> float:
        """The lowest rate at which a length is not faster; infinite where it is faster at every rate."""
        return min((load for load in self.latency if self.speedup(name, load) <= 1.0), default=math.inf)

    def rebounds(self) -> str:
        """The lowest speedup of each fixed length, and the highest one at a higher rate."""
        cells = []
        for name in self.fixed:
            load = min(self.latency, key=lambda load: self.speedup(name, load))
            later = [self.speedup(name, other) for other in self.latency if other > load]
            after = f", later up to {max(later):.2f}×" if later else ", the highest rate"
            cells.append(f"{name} {self.speedup(name, load):.2f}× at {load:g}/s{after}")
        return "; ".join(cells)

    def row(self, load: float) -> str:
        """All speedups at a load."""
        return ", ".join(f"{name} {self.speedup(name, load):.2f}×" for name in (*self.fixed, self.adaptive))

    def span(self) -> str:
        """The adaptive one's speedups over all loads."""
        found = [self.speedup(self.adaptive, load) for load in self.latency]
        return f"{min(found):.2f} to {max(found):.2f}×"

    def against_best(self, load: float) -> tuple[float, str]:
        """The adaptive one's latency over that of the best other one, which may be no speculation, and its name."""
        others = {name: value for name, value in self.latency[load].items() if name in (BASE, *self.fixed)}
        best = min(others, key=lambda name: others[name])
        return self.latency[load][self.adaptive] / others[best], best

    def worst_regret(self) -> str:
        """The load at which the adaptive policy loses most to the best other policy."""
        load = max(self.latency, key=lambda load: self.against_best(load)[0])
        return "{:.2f} of {}, at {:g}/s".format(*self.against_best(load), load)
