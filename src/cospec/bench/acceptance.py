"""Acceptance by drafter, domain, temperature and position, with intervals.

Each commit of each request is one observation: draft depth, accepted length, and whether a token was rejected.
Intervals resample whole prompts, because tokens of one output are dependent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from cospec.bench.request_record import Prompt
from cospec.bench.step_recorder import PolicyRecorder, recorded_engine
from cospec.config import EngineConfig
from cospec.core.engine import Engine
from cospec.core.types import Commit
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests

RESAMPLES, CONFIDENCE = 2000, 0.95


@dataclass(slots=True)
class Tally:
    """The draft results of one prompt.

    Attributes:
        accepted, refused: by draft position, from 0: accepted tokens, and drafts with a rejection there.
        calls: target steps of the request, its prompt's included.
    """

    drafts: int = 0
    proposed: int = 0
    accepted: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    tokens: int = 0
    calls: int = 0

    def add(self, commit: Commit) -> None:
        """Add one step."""
        self.calls += 1
        self.tokens += len(commit.tokens)
        if not commit.drafted:
            return
        self.drafts += 1
        self.proposed += commit.drafted
        kept = len(commit.path)
        for counts in (self.accepted, self.refused):
            counts.extend([0] * (kept + 1 - len(counts)))
        for place in range(kept):
            self.accepted[place] += 1
        self.refused[kept] += commit.rejected


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval; None without observations."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.value is None:
            return "-"
        return f"{self.value:.2f}" if self.low is None else f"{self.value:.2f}\n{self.low:.2f} to {self.high:.2f}"


@dataclass(frozen=True, slots=True)
class Row:
    """One drafter on one domain at one temperature.

    Attributes:
        alpha: accepted / (accepted + rejections), the conditional rate per position.
        draft_acceptance_rate: accepted / proposed, as servers report.
        mean_acceptance_length: 1 + accepted / drafts.
        calls_per_token: target steps per generated token, one request at a time.
        by_position: ``alpha`` at each position of the draft.
    """

    drafter: str
    domain: str
    temperature: float
    prompts: int
    tokens: int
    alpha: Estimate
    draft_acceptance_rate: Estimate
    mean_acceptance_length: Estimate
    calls_per_token: Estimate
    by_position: tuple[Estimate, ...]


def summarise(drafter: str, domain: str, temperature: float, tallies: Sequence[Tally]) -> Row:
    """Summarise the prompts of one domain."""
    depth = max((len(tally.accepted) for tally in tallies), default=0)

    def at(place: int) -> Callable[[Tally], tuple[float, float]]:
        return lambda one: (_at(one.accepted, place), _at(one.accepted, place) + _at(one.refused, place))

    return Row(
        drafter,
        domain,
        temperature,
        len(tallies),
        sum(tally.tokens for tally in tallies),
        ratio(tallies, lambda one: (sum(one.accepted), sum(one.accepted) + sum(one.refused))),
        ratio(tallies, lambda one: (sum(one.accepted), one.proposed)),
        ratio(tallies, lambda one: (one.drafts + sum(one.accepted), one.drafts)),
        ratio(tallies, lambda one: (one.calls, one.tokens)),
        tuple(found for place in range(depth) if (found := ratio(tallies, at(place))).value is not None),
    )


def ratio(tallies: Sequence[Tally], parts: Callable[[Tally], tuple[float, float]]) -> Estimate:
    """Return the ratio of sums with its percentile bootstrap over prompts; a single prompt has no interval."""
    table = np.array([parts(tally) for tally in tallies], dtype=np.float64).reshape(-1, 2)
    above, below = table.sum(axis=0) if len(table) else (0.0, 0.0)
    if below == 0:
        return Estimate(None)
    if len(table) < 2:
        return Estimate(above / below)
    picks = np.random.default_rng(0).integers(len(table), size=(RESAMPLES, len(table)))
    sums = table[picks].sum(axis=1)
    found = sums[:, 0][sums[:, 1] > 0] / sums[:, 1][sums[:, 1] > 0]
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(above / below), float(low), float(high))


def measure(
    drafter: str, config: EngineConfig, prompts: Sequence[Prompt], temperatures: Sequence[float], max_tokens: int
) -> list[Row]:
    """Measure every domain at every temperature, and all domains together if there are several."""
    engine, recorder = recorded_engine(config)
    rows = []
    for temperature in temperatures:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        tallies = _run(engine, recorder, prompts, params)
        domains = list(dict.fromkeys(prompt.category for prompt in prompts))
        for domain in domains:
            own = [tally for prompt, tally in zip(prompts, tallies, strict=True) if prompt.category == domain]
            rows.append(summarise(drafter, domain, temperature, own))
        if len(domains) > 1:
            rows.append(summarise(drafter, "all", temperature, tallies))
    return rows


def _run(engine: Engine, recorder: PolicyRecorder, prompts: Sequence[Prompt], params: SamplingParams) -> list[Tally]:
    """Return the tallies of the prompts in order; seeds are prompt numbers, so that runs are repeatable."""
    recorder.clear()
    tallies: dict[str, Tally] = {}
    for number, prompt in enumerate(prompts):
        (request,) = make_requests(f"accept-{number}", engine.tokenizer.encode(prompt.text), params)
        engine.add(replace(request, seed=number))
        tallies[request.id] = Tally()
    while engine.has_work:
        engine.step()
    for commit in recorder.commits:
        tallies[commit.id].add(commit)
    return list(tallies.values())


def as_runs(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Convert the rows for a report; ``intervals`` has the values that tables omit."""
    return [
        {
            "label": f"{row.drafter}, {row.domain}, T {row.temperature:g}",
            "speculation": {
                "acceptance_rate": row.alpha.value,
                "draft_acceptance_rate": row.draft_acceptance_rate.value,
                "mean_acceptance_length": row.mean_acceptance_length.value,
                "target_calls_per_token": row.calls_per_token.value,
                "acceptance_per_position": [one.value for one in row.by_position],
            },
            "intervals": asdict(row),
        }
        for row in rows
    ]


def _at(counts: Sequence[int], place: int) -> int:
    return counts[place] if place < len(counts) else 0
