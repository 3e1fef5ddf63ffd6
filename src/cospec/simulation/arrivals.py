"""Arrival processes: open loops by rate or by a recorded trace, and the closed loop, which has no times.

An *open* loop sends requests at fixed times, independent of the server. A *closed* loop sends the next request when a
request has ended, so the server sets the rate. A closed loop is a set of requests due at the start with a limit on
concurrency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from cospec.errors import InvalidInput, words


class Arrivals(Protocol):
    """An arrival process."""

    @property
    def label(self) -> str:
        """Description for reports."""

    @property
    def rate(self) -> float | None:
        """Requests per second; None if the times follow no rate."""

    @property
    def burstiness(self) -> float | None:
        """See ``ByRate``; None if the times follow no rate."""

    def times(self, n: int, seed: int) -> list[float]:
        """Return the times of ``n`` requests: ascending seconds from the start, determined by the seed."""


@dataclass(frozen=True, slots=True)
class ByRate:
    """A renewal process with gamma gaps of mean ``1 / rate``.

    Attributes:
        rate: requests per second.
        burstiness: the gamma's shape, as in ``vllm bench serve``: 1 is Poisson, smaller is burstier, larger is
            steadier. The gaps' coefficient of variation is ``1 / sqrt(burstiness)``.
    """

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.rate < math.inf):
            raise InvalidInput("request_rate", self.rate, "a number above 0, or inf")
        if not (0 < self.burstiness < math.inf):
            raise InvalidInput("burstiness", self.burstiness, "a number above 0")

    @property
    def label(self) -> str:
        """See ``Arrivals``."""
        kind = "Poisson" if self.burstiness == 1.0 else f"gamma with burstiness {self.burstiness:g}"
        return f"{self.rate:g} requests/s, {kind}"

    def times(self, n: int, seed: int) -> list[float]:
        """See ``Arrivals``; the first request arrives at 0."""
        generator = np.random.default_rng(seed)
        gaps = generator.gamma(self.burstiness, 1.0 / (self.rate * self.burstiness), size=max(n - 1, 0))
        return [0.0, *np.cumsum(gaps).tolist()][:n]


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All requests are due at the start; with a limit on concurrency this is the closed loop."""

    rate: ClassVar[float | None] = None
    burstiness: ClassVar[float | None] = None

    @property
    def label(self) -> str:
        """See ``Arrivals``."""
        return "all at once"

    def times(self, n: int, seed: int) -> list[float]:
        """See ``Arrivals``."""
        return [0.0] * n


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded times, shifted so that the first is 0."""

    recorded: tuple[float, ...]
    name: str = "trace"
    rate: ClassVar[float | None] = None
    burstiness: ClassVar[float | None] = None

    @property
    def label(self) -> str:
        """See ``Arrivals``."""
        return f"recorded times from {self.name}"

    def times(self, n: int, seed: int) -> list[float]:
        """See ``Arrivals``.

        Raises:
            InvalidInput: the trace has fewer than ``n`` times.
        """
        if n > len(self.recorded):
            raise InvalidInput("num_prompts", n, f"at most {len(self.recorded)}, the length of the trace")
        return [time - self.recorded[0] for time in self.recorded[:n]]

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a file with one time in seconds per line, ascending. Blank lines and lines with ``#`` are skipped.

        Raises:
            InvalidInput: the file is unreadable, or a line is no valid time. The error names the line.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise InvalidInput("trace", str(path), f"a readable text file ({why})") from None
        found: list[float] = []
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                found.append(_time(line.strip(), number, found[-1] if found else 0.0))
        if not found:
            raise InvalidInput("trace", words(f"{path}, which holds no times"), "a file with one time per line")
        return cls(tuple(found), path.name)


def by_rate(rate: float, burstiness: float = 1.0) -> Arrivals:
    """Return arrivals at ``rate`` requests per second; ``inf`` sends all at once.

    Raises:
        InvalidInput: the rate or the burstiness is not above 0.
    """
    return AtOnce() if rate == math.inf else ByRate(rate, burstiness)


def _time(text: str, line: int, before: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not before <= value < math.inf:
        raise InvalidInput(f"trace, line {line}", text, "a time in seconds, at least the time of the line above")
    return value
