"""Prometheus metrics: what the engine counts and what the server times, in vLLM's names with the prefix ``cospec:``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from cospec.core.interfaces import Clock
from cospec.core.types import Event
from cospec.metrics.engine_counters import SECONDS_PER_HOUR, price_per_million, prices_of
from cospec.runtime.engine_client import EngineStatus
from cospec.server.machine_costs import MachineCosts
from cospec.server.node_metrics import node_families

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "cospec:"
TTFT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
ITL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)

GAUGES = {
    "num_requests_running": ("requests_running", "Requests whose sequences are in steps."),
    "num_requests_waiting": ("requests_waiting", "Requests that wait to be admitted."),
    "steps_in_flight": ("steps_in_flight", "Steps that the verifier has not answered."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Share of the KV cache in use, 1 is all of it."),
}
COUNTERS = {
    "num_preemptions": ("num_preemptions", "Requests that gave up their KV cache to others."),
    "verifier_losses": (
        "verifier_losses",
        "Losses of the target's processes, after which KV caches are computed again.",
    ),
    "cancelled_steps": (
        "cancelled_steps",
        "Steps in flight that were cancelled because nothing reads their outputs any more.",
    ),
    "integrity_checks": ("integrity_checks", "Checks of the idle engine for leaked pages and states."),
    "integrity_errors": ("integrity_errors", "Checks that found leaked pages or states; the log has details."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed or found."),
    "generation_tokens": ("generation_tokens", "Tokens committed to outputs."),
    "target_calls": ("target_calls", "Forward passes of the target."),
    "native_requests": ("native_requests", "Requests of each step that ran natively in all parts."),
}
BY_DRAFTER = {
    "spec_decode_num_drafts": ("drafts", "Drafts verified."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Draft tokens verified."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Draft tokens accepted."),
}
POLICY = {
    "speculation_length": "Tokens drafted per sequence in the latest decision, on average.",
    "predicted_step_seconds": "Predicted time of the latest step.",
    "prediction_error": "Median relative error of the time model over recent steps.",
    "time_model_refits": "Refits of the time model, after bad predictions.",
    "expected_goodput": "Tokens per second that the latest decision expects.",
    "acceptance_rate": "Accepted / (accepted + rejections), over recent steps; a draft has at most one rejection.",
}
STEPS = {
    "step_seconds": ("step_seconds", "Time of steps."),
    "step_draft_seconds": ("draft_seconds", "Time of drafting in steps."),
    "step_target_seconds": ("target_seconds", "Time of submitting to the target and waiting, in steps."),
}


class ServerMetrics:
    """Latencies as the server sees them, and the engine's numbers when they are asked for.

    Attributes:
        machine_costs: has to note the prices at intervals; a request of the metrics changes nothing.
    """

    def __init__(self, model_name: str, clock: Clock = time.monotonic) -> None:
        self._model, self._tokens = model_name, 0
        self.machine_costs = MachineCosts(clock)
        self._registry = CollectorRegistry()
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS)
        self._itl = self._histogram(
            "inter_token_latency_seconds",
            "Time per output token; tokens that come together share the time since those before them.",
            ITL_BUCKETS,
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", E2E_BUCKETS)

    def clock(self, arrival: float) -> LatencyMetrics:
        """A stopwatch for one request that arrived at ``arrival`` (seconds, monotonic clock)."""
        return LatencyMetrics(arrival, self._count, self._ttft, self._itl, self._e2e)

    def render(self, engine: Mapping[str, Any] | None, status: EngineStatus) -> bytes:
        """All metrics in Prometheus' text format.

        Args:
            engine: the engine's ``EngineMetrics`` as a dictionary; None where the engine does not answer.
        """
        snapshot = CollectorRegistry(auto_describe=False)
        answered = [] if engine is None else [*families(engine, self._model), *self._costs(engine)]
        snapshot.register(_Snapshot([*answered, *_supervision(status, self._model)]))
        return generate_latest(snapshot) + generate_latest(self._registry)

    def _costs(self, engine: Mapping[str, Any]) -> list[Metric]:
        """Prices per hour, and the price of tokens since the start of the server, idle time included.

        The server counts the tokens, because an engine's count starts again with its process.
        """
        prices = prices_of(engine)
        spent = self.machine_costs.spent(prices)
        if not (prices or spent):
            return []
        per_hour = GaugeMetricFamily(
            PREFIX + "cost_per_hour", "Declared price per hour of the machines.", labels=["model_name", "component"]
        )
        for name, cost in prices.items():
            per_hour.add_metric([self._model, name], cost)
        price = price_per_million(spent, self._tokens, SECONDS_PER_HOUR)
        per_million = GaugeMetricFamily(
            PREFIX + "price_per_million_tokens", "Price of output tokens since the start.", labels=["model_name"]
        )
        if price is not None:
            per_million.add_metric([self._model], price)
        return [per_hour, per_million]

    def _count(self, tokens: int) -> None:
        self._tokens += tokens

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry)
        return family.labels(self._model)


class LatencyMetrics:
    """Times one request's events."""

    def __init__(
        self, arrival: float, count: Callable[[int], None], ttft: Histogram, itl: Histogram, e2e: Histogram
    ) -> None:
        self._arrival, self._count = arrival, count
        self._last: float | None = None
        self._ttft, self._itl, self._e2e = ttft, itl, e2e

    def observe(self, event: Event, now: float) -> None:
        """Count an event that came at ``now``."""
        if event.tokens:
            self._count(len(event.tokens))
            later = len(event.tokens)
            if self._last is None:
                self._last, later = self._first(event, now)
                self._ttft.observe(self._last - self._arrival)
            for _ in range(later):
                self._itl.observe((now - self._last) / later)
            self._last = now
        if event.finish is not None and self._last is not None:
            self._e2e.observe(now - self._arrival)

    def _first(self, event: Event, now: float) -> tuple[float, int]:
        """When the first token came, and how many came later; where one event brings all, its statistics know."""
        stats = event.stats
        if stats is None or stats.ttft is None or stats.ttft == stats.e2e:
            return now, 0
        return min(self._arrival + stats.ttft, now), len(event.tokens) - 1


def _supervision(status: EngineStatus, model: str) -> list[Metric]:
    """What the server knows by itself of the engine."""
    gauges = {
        "engine_up": (
            "1 while the engine, or one of the replicas' engines, serves and makes progress, else 0.",
            int(status.up),
        )
    }
    gauges["num_requests_live"] = ("Outputs that the server waits for.", status.live)
    counters = {"engine_restarts": ("Engine processes started after the first one.", status.restarts)}
    counters["requests_replayed"] = ("Outputs that a new engine process went on with.", status.replayed)
    counters["ray_head_restarts"] = ("Starts of Ray's head after the first one.", status.head_restarts)
    counters["replicas_lost"] = ("Replicas that ended while Ray Serve needed them.", status.replicas_lost)
    counters["stage_host_restarts"] = ("Stage hosts started again after a loss.", status.stage_host_restarts)
    found: list[Metric] = []
    for kind, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (text, value) in figures.items():
            family = kind(PREFIX + name, text, labels=["model_name"])
            family.add_metric([model], value)
            found.append(family)
    return found


def families(engine: Mapping[str, Any], model: str) -> list[Metric]:
    """The engine's numbers as metric families, each with the label ``model_name``."""
    found: list[Metric] = []
    for name, (key, text) in GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        gauge.add_metric([model], engine[key])
        found.append(gauge)
    for name, (key, text) in COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        counter.add_metric([model], engine[key])
        found.append(counter)
    finished = CounterMetricFamily(
        PREFIX + "request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
    )
    for reason, count in engine["requests_finished"].items():
        finished.add_metric([model, str(reason)], count)
    found.append(finished)
    python_path = CounterMetricFamily(
        PREFIX + "python_path_requests",
        "Requests of each step that Python drafted, edited or verified, by reason.",
        labels=["model_name", "reason"],
    )
    for reason, count in engine["python_path_requests"].items():
        python_path.add_metric([model, reason], count)
    found.append(python_path)
    for name, (key, text) in STEPS.items():
        summary = SummaryMetricFamily(PREFIX + name, text, labels=["model_name"])
        summary.add_metric([model], count_value=engine["steps"], sum_value=engine[key])
        found.append(summary)
    divergence = SummaryMetricFamily(
        PREFIX + "distribution_divergence",
        "Total variation of relaxed blends from the target, before temperature, per token of ended requests.",
        labels=["model_name"],
    )
    divergence.add_metric([model], count_value=engine["relaxed_tokens"], sum_value=engine["divergence"])
    found.append(divergence)
    for name, value in engine["policy"].items():
        gauge = GaugeMetricFamily(PREFIX + name, POLICY.get(name, "A figure of the policy."), labels=["model_name"])
        gauge.add_metric([model], value)
        found.append(gauge)
    labels = dict(engine["execution_mode_info"])
    info = GaugeMetricFamily(
        PREFIX + "execution_mode_info", "The execution mode in use, and the reason; 1.", labels=["model_name", *labels]
    )
    info.add_metric([model, *labels.values()], 1)
    return [*found, info, *_speculation(engine, model)]


def _speculation(engine: Mapping[str, Any], model: str) -> list[Metric]:
    found: list[Metric] = []
    for name, (key, text) in BY_DRAFTER.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name", "drafter"])
        for drafter, count in engine[key].items():
            counter.add_metric([model, drafter], count)
        found.append(counter)
    per_position = CounterMetricFamily(
        PREFIX + "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by their position in the draft.",
        labels=["model_name", "drafter", "position"],
    )
    for drafter, counts in engine["accepted_per_pos"].items():
        for position, count in enumerate(counts):
            per_position.add_metric([model, drafter, str(position)], count)
    found.append(per_position)
    weights = GaugeMetricFamily(
        PREFIX + "drafter_weight",
        "Mean weight of a pool's drafter over the requests.",
        labels=["model_name", "drafter"],
    )
    for drafter, weight in engine.get("drafter_weights", {}).items():
        weights.add_metric([model, drafter], weight)
    found.append(weights)
    ahead = CounterMetricFamily(
        PREFIX + "drafts_ahead",
        "Drafts made during verification that were used: after its likeliest or another outcome, or in flight.",
        labels=["model_name", "outcome"],
    )
    for outcome, count in engine.get("drafts_ahead", {}).items():
        ahead.add_metric([model, outcome], count)
    found.append(ahead)
    return [*found, *node_families(engine.get("nodes", ()), engine.get("node_totals", ()), model)]


class _Snapshot(Collector):
    """Metric families that were read already."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found
