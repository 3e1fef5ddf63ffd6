"""A system that takes the given times and writes the prompt back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cospec.bench.counters import SpeculationCounters
from cospec.bench.request_record import Chunk, Params, Prompt, Timing


class FakeSystem:
    """Each run takes the next of ``seconds``, in chunks of two characters, and notes what happened in ``log``."""

    price = 0.0

    def __init__(self, name: str, seconds: Iterator[float], log: list[str], fails: Sequence[int] = ()) -> None:
        self.name, self._seconds, self._log, self._fails = name, seconds, log, fails
        self.runs = 0

    def start(self) -> None:
        self._log.append(f"start {self.name}")

    def stop(self) -> None:
        self._log.append(f"stop {self.name}")

    def counters(self) -> SpeculationCounters | None:
        return SpeculationCounters(self.runs, 4 * self.runs, 2 * self.runs, (self.runs, self.runs), self.runs, 8)

    def cost_per_hour(self) -> float:
        return self.price

    def run(self, prompts: Sequence[Prompt], params: Params) -> list[Timing]:
        self.runs += 1
        self._log.append(self.name)
        took = next(self._seconds)
        return [self._one(prompt, took, params) for prompt in prompts]

    def _one(self, prompt: Prompt, took: float, params: Params) -> Timing:
        text = (prompt.text * params.max_tokens)[: params.max_tokens]
        pieces = [text[start : start + 2] for start in range(0, len(text), 2)]
        chunks = tuple(Chunk(took * (number + 1) / len(pieces), piece) for number, piece in enumerate(pieces))
        error = "it broke" if self.runs in self._fails else None
        return Timing(
            id=prompt.id,
            arrival=0.0,
            sent=0.0,
            end=took,
            chunks=chunks,
            category=prompt.category,
            prompt_tokens=len(prompt.text),
            reported_tokens=len(text),
            error=error,
            error_kind=error and "engine",
        )
