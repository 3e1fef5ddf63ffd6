"""Measures one system at fixed batch sizes: batches run one after the other, without arrivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cospec.bench.metrics import Selection
from cospec.bench.request_record import Params, Prompt, Timing
from cospec.bench.run_figures import figures
from cospec.bench.systems import System
from cospec.bench.token_counter import TokenCounter


@dataclass(frozen=True, slots=True)
class Batches:
    """A batch size, its uncounted ``warmups`` and its counted ``iterations``."""

    size: int
    iterations: int = 5
    warmups: int = 1

    @property
    def prompts(self) -> int:
        """Number of prompts, so that every iteration has its own prompts."""
        return self.size * (self.iterations + self.warmups)

    def cut(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Return one batch of prompts per iteration, warm-ups first."""
        return [list(prompts[start : start + self.size]) for start in range(0, self.prompts, self.size)]


class Bench:
    """Runs batches on a started system.

    Args:
        done: called after every iteration.
    """

    def __init__(
        self, system: System, params: Params, counter: TokenCounter, done: Callable[[], None] = lambda: None
    ) -> None:
        self._system, self._params, self._counter, self._done = system, params, counter, done

    def run(self, batches: Batches, prompts: Sequence[Prompt], selection: Selection) -> dict[str, Any]:
        """Return the values of one batch size; ``seconds`` lists the iterations."""
        work = batches.cut(prompts)
        for piece in work[: batches.warmups]:
            self._iterate(piece)
        before = self._system.counters()
        runs = [self._iterate(piece) for piece in work[batches.warmups :]]
        after = self._system.counters()
        counters = after - before if before is not None and after is not None else None
        timings: list[Timing] = []
        seconds: list[float] = []
        for piece, run in zip(work[batches.warmups :], runs, strict=True):
            timings += self._counter.count(piece, run)
            seconds.append(max(one.end for one in run))
        found = figures(timings, sum(seconds), selection, counters)
        return {"label": f"batch {batches.size}", "batch": batches.size, **found, "seconds": seconds}

    def _iterate(self, piece: Sequence[Prompt]) -> list[Timing]:
        timings = self._system.run(piece, self._params)
        self._done()
        return timings
