"""What the engine counts, in plain numbers; servers and benchmarks give them their names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cospec.core.stats import RequestStats, StepStats
from cospec.core.types import Commit, StepOutput

SECONDS_PER_HOUR = 3600.0
MILLION = 1e6
NODE = "node:"  # before the names of drafter nodes, which choose their names
MEANS = frozenset({"kv_cache_usage", "drafter_weights", "policy"})  # of several engines; other figures are sums


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """A snapshot. Times are sums in seconds; per-drafter figures are keyed by the drafter's name."""

    requests_running: int = 0
    requests_waiting: int = 0
    steps_in_flight: int = 0  # submitted and not collected
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    integrity_checks: int = 0  # of the idle engine
    integrity_errors: int = 0  # of these checks, those that found leaked pages or states
    verifier_losses: int = 0  # after which the target's KV cache was computed again
    cancelled_steps: int = 0  # in flight, whose outputs nothing reads any more
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: dict[str, int] = field(default_factory=dict)
    draft_tokens: dict[str, int] = field(default_factory=dict)
    accepted_tokens: dict[str, int] = field(default_factory=dict)
    accepted_per_pos: dict[str, list[int]] = field(default_factory=dict)
    target_calls: int = 0  # forwards, each for a whole batch
    steps: int = 0
    step_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    native_requests: int = 0  # requests of each step that ran natively in all parts
    python_path_requests: dict[str, int] = field(default_factory=dict)  # the others, by reason
    requests_finished: dict[str, int] = field(default_factory=dict)
    divergence: float = 0.0  # of ended requests with a relaxed blend, see ``RequestStats``
    relaxed_tokens: int = 0
    execution_mode_info: dict[str, str] = field(default_factory=dict)  # the execution mode in use, and the reason
    drafts_ahead: dict[str, int] = field(default_factory=dict)  # used drafts made during verification, by outcome
    drafter_weights: dict[str, float] = field(default_factory=dict)  # of a pool, at present
    nodes: list[dict[str, Any]] = field(default_factory=list)  # drafter nodes, see ``cluster.nodes.hub.NodeHub.status``
    node_totals: list[dict[str, Any]] = field(default_factory=list)  # see ``NodeHub.totals``
    policy: dict[str, float] = field(default_factory=dict)  # the policy's own figures, by name
    prices: dict[str, float] = field(default_factory=dict)  # declared, per hour, by the component of the machine
    engines: int = 1  # more in the joined metrics of several replicas


class Counters:
    """Sums over the life of an engine."""

    def __init__(self) -> None:
        self.drafts: Counter[str] = Counter()
        self.draft_tokens: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.per_position: dict[str, Counter[int]] = defaultdict(Counter)
        self.finished: Counter[str] = Counter()
        self.python_path: Counter[str] = Counter()
        self.native = self.verifier_losses = self.cancelled_steps = 0
        self.prompt_tokens = self.prefix_cache_hits = self.generated = self.steps = 0
        self.divergence, self.relaxed_tokens = 0.0, 0
        self.seconds = self.draft_seconds = self.target_seconds = 0.0

    def observe(self, outputs: Sequence[StepOutput], commits: Sequence[Commit], stats: StepStats) -> None:
        """Add one step."""
        self.steps += stats.times.steps
        self.seconds += stats.total
        self.draft_seconds += stats.times.draft
        self.target_seconds += stats.times.target
        self.generated += stats.committed
        if stats.drafts:
            for output, commit in zip(outputs, commits, strict=True):
                if output.draft is not None:
                    self._count_draft(output.draft.drafters, commit.path)

    def ran(self, requests: int, python_path: Mapping[str, str]) -> None:
        """Count ``requests`` of a step; ``python_path`` gives the reason for each that was not native."""
        self.native += requests - len(python_path)
        if python_path:
            self.python_path.update(python_path.values())

    def _count_draft(self, names: Sequence[str], path: Sequence[int]) -> None:
        for name in set(names):
            self.drafts[name] += 1
            self.draft_tokens[name] += names.count(name)
        for depth, node in enumerate(path):
            self.accepted[names[node]] += 1
            self.per_position[names[node]][depth] += 1

    def finish(self, stats: RequestStats, prompt: int, reason: str) -> None:
        """Count an ended request with ``prompt`` tokens in its prompt."""
        self.prompt_tokens += prompt
        self.prefix_cache_hits += stats.cached_prompt_tokens
        self.divergence += stats.divergence
        self.relaxed_tokens += stats.relaxed_tokens
        self.finished[str(reason)] += 1

    def snapshot(self, running: int, waiting: int, usage: float, preemptions: int) -> EngineMetrics:
        """Return these sums and the engine's present state."""
        positions = {
            name: [counts[depth] for depth in range(max(counts) + 1)] for name, counts in self.per_position.items()
        }
        return EngineMetrics(
            requests_running=running,
            requests_waiting=waiting,
            kv_cache_usage=usage,
            num_preemptions=preemptions,
            verifier_losses=self.verifier_losses,
            cancelled_steps=self.cancelled_steps,
            prefix_cache_queries=self.prompt_tokens,
            prefix_cache_hits=self.prefix_cache_hits,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generated,
            drafts=dict(self.drafts),
            draft_tokens=dict(self.draft_tokens),
            accepted_tokens=dict(self.accepted),
            accepted_per_pos=positions,
            target_calls=self.steps,
            steps=self.steps,
            step_seconds=self.seconds,
            draft_seconds=self.draft_seconds,
            target_seconds=self.target_seconds,
            native_requests=self.native,
            python_path_requests=dict(self.python_path),
            requests_finished=dict(self.finished),
            divergence=self.divergence,
            relaxed_tokens=self.relaxed_tokens,
        )


def merge(engines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join ``EngineMetrics``, each as a dictionary, of at least one engine.

    Texts are those of the first engine. Lists of numbers are added up by position; lists of objects are joined.
    """
    return {key: _join([each[key] for each in engines], key in MEANS) for key in engines[0]}


def _join(values: list[Any], mean: bool) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for each in values for key in each)
        return {key: _join([each[key] for each in values if key in each], mean) for key in keys}
    if isinstance(first, list):
        if any(isinstance(item, Mapping) for each in values for item in each):
            return [item for each in values for item in each]
        longest = max(len(each) for each in values)
        return [sum(each[number] for each in values if number < len(each)) for number in range(longest)]
    if isinstance(first, str):
        return first
    return sum(values) / len(values) if mean else sum(values)


def price_per_million(cost_per_hour: float, tokens: float, seconds: float) -> float | None:
    """Return the price of a million output tokens of machines that wrote ``tokens`` in ``seconds``; None without
    tokens.

    Source: CoSine, tables 1 and 3.

    Args:
        cost_per_hour: of all machines, in any currency.
    """
    return cost_per_hour / SECONDS_PER_HOUR * seconds / tokens * MILLION if tokens else None


def prices_of(engine: Mapping[str, Any]) -> dict[str, float]:
    """Return the price per hour of each component with a price.

    Args:
        engine: ``EngineMetrics`` as a dictionary.
    """
    prices = Counter(engine["prices"])
    for node in engine.get("nodes", ()):
        prices[NODE + node["node"]] += node["cost_per_hour"]
    return {name: price for name, price in prices.items() if price}
