"""Speculation counters of a whole system, from an engine's metrics or a server's Prometheus page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PREFIXES = ("cospec:", "vllm:")
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
SUMS = {
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "draft_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
    "target_calls": "target_calls",
    "generation_tokens": "generation_tokens",
}
COST = "cost_per_hour"  # one sample for each machine
GAUGES = {"num_requests_running": "running", "num_requests_waiting": "waiting"}


@dataclass(frozen=True, slots=True)
class SpeculationCounters:
    """Sums since the system's start. The difference of two snapshots counts the runs between them.

    Attributes:
        accepted_per_pos: accepted draft tokens by draft position.
        target_calls: target forwards over whole batches; None if not counted.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    target_calls: int | None = None
    generation_tokens: int = 0

    def __sub__(self, before: SpeculationCounters) -> SpeculationCounters:
        return self._with(before, int.__sub__)

    def __add__(self, more: SpeculationCounters) -> SpeculationCounters:
        return self._with(more, int.__add__)

    def _with(self, other: SpeculationCounters, join: Callable[[int, int], int]) -> SpeculationCounters:
        pairs = zip_longest(self.accepted_per_pos, other.accepted_per_pos, fillvalue=0)
        known = self.target_calls is not None and other.target_calls is not None
        return SpeculationCounters(
            join(self.drafts, other.drafts),
            join(self.draft_tokens, other.draft_tokens),
            join(self.accepted_tokens, other.accepted_tokens),
            tuple(join(own, its) for own, its in pairs),
            join(self.target_calls or 0, other.target_calls or 0) if known else None,
            join(self.generation_tokens, other.generation_tokens),
        )

    @property
    def length(self) -> float | None:
        """Mean tokens per draft; None without drafts."""
        return self.draft_tokens / self.drafts if self.drafts else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts; None without drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def per_position(self) -> list[float]:
        """Share of drafts whose token at each position was accepted; unconditional, as servers report."""
        return [count / self.drafts for count in self.accepted_per_pos] if self.drafts else []


@dataclass(frozen=True, slots=True)
class LoadSample:
    """A server's load at one moment.

    Attributes:
        at: seconds on the run's clock.
        cost_per_hour: the declared price of the machines that run now; 0 if none is declared.
    """

    at: float
    running: int
    waiting: int
    counters: SpeculationCounters
    cost_per_hour: float = 0.0


def from_engine(metrics: Mapping[str, Any]) -> SpeculationCounters:
    """Build from an ``EngineMetrics`` dictionary, summed over drafters."""
    per_position = [sum(counts) for counts in zip_longest(*metrics["accepted_per_pos"].values(), fillvalue=0)]
    return SpeculationCounters(
        sum(metrics["drafts"].values()),
        sum(metrics["draft_tokens"].values()),
        sum(metrics["accepted_tokens"].values()),
        tuple(per_position),
        metrics["target_calls"],
        metrics["generation_tokens"],
    )


def from_prometheus(text: str, at: float = 0.0) -> LoadSample | None:
    """Build from the ``/metrics`` page of cospec or vLLM; None without known names."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    found, cost = False, 0.0
    for name, labels, value in _samples(text):
        if name == PER_POSITION:
            position = int(labels.get("position", 0))
            positions[position] = positions.get(position, 0) + value
        cost += value if name == COST else 0.0
        field = SUMS.get(name) or GAUGES.get(name)
        if field is not None:
            found = True
            sums[field] = sums.get(field, 0) + value
    if not found:
        return None
    whole = {field: int(value) for field, value in sums.items()}
    counters = SpeculationCounters(
        whole.get("drafts", 0),
        whole.get("draft_tokens", 0),
        whole.get("accepted_tokens", 0),
        tuple(int(positions.get(i, 0)) for i in range(max(positions, default=-1) + 1)),
        whole.get("target_calls"),
        whole.get("generation_tokens", 0),
    )
    return LoadSample(at, whole.get("running", 0), whole.get("waiting", 0), counters, cost)


def _samples(text: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    """Yield names without prefix and ``_total``, labels and values."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            prefix = next((prefix for prefix in PREFIXES if sample.name.startswith(prefix)), None)
            if prefix is not None:
                yield sample.name.removeprefix(prefix).removesuffix("_total"), sample.labels, sample.value
