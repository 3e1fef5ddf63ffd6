"""Reading ``benchmarks.collaborative``: ways of decoding with several models, over the standard one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.sources import Found, Source

COLLABORATIVE = Source("collaborative", "python -m benchmarks.collaborative")
SWEEPS = Source("collaborative_sweeps", "python -m benchmarks.collaborative_sweeps")


@dataclass(frozen=True, slots=True)
class Collaborations:
    """Rows of one setting: models and how their distributions become one."""

    found: Found
    setting: str

    def rows(self, temperature: float, batch: int) -> list[Found]:
        """By domain.

        Raises:
            KeyError: it was not measured.
        """
        every = self.found["settings"][self.setting]
        rows = [row for row in every if (row["temperature"], row["batch"]) == (temperature, batch)]
        if not rows:
            raise KeyError((temperature, batch))
        return rows

    def over_standard(self, method: str, temperature: float, batch: int) -> str:
        """Speed of a method on each domain."""
        cells = [f"{row['domain']} {interval(row['over_standard'][method])}" for row in self.rows(temperature, batch)]
        return ", ".join(cells)

    def theory(self, kind: str, theorem: str, temperature: float) -> tuple[str, str]:
        """What the theorem predicts for each domain, and the exact process and the measurement beside it."""
        rows = [row for row in self.rows(temperature, 1) if "theory" in row]
        said = ", ".join(f"{row['domain']} {row['theory'][theorem]:.2f}×" for row in rows)
        ours = ", ".join(
            "{} {:.2f}× (process {:.2f}×)".format(
                row["domain"], row["theory"][f"{kind} measured"], row["theory"][f"{kind} process"]
            )
            for row in rows
        )
        return said, ours

    def calls(self, method: str, temperature: float) -> str:
        """Calls of all models for a committed token."""
        rows = [row for row in self.rows(temperature, 1) if "calls_per_token" in row]
        return ", ".join(f"{row['domain']} {sum(row['calls_per_token'][method].values()):.2f}" for row in rows)

    def sweep(self, value: str) -> str:
        """Speed at each point.

        Raises:
            KeyError: it was not swept.
        """
        points = self.found["sweeps"][self.setting][value]
        return ", ".join(f"{point}: {speed[0]:.2f}×" for point, speed in points.items())


def interval(figures: Sequence[Any]) -> str:
    """A ratio and its interval."""
    return "{:.2f}× ({:.2f} to {:.2f})".format(*figures)
