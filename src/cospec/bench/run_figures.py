"""Turns timings into the values of one run: a flat dictionary under ``vllm bench serve``'s names, with additions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from cospec.bench.counters import LoadSample, SpeculationCounters
from cospec.bench.metrics import Selection, latency, summarise
from cospec.bench.request_record import Timing

SUMMED = ("target_calls", "drafts", "drafted", "accepted", "rejections")


def figures(
    timings: Sequence[Timing],
    duration: float,
    selection: Selection,
    counters: SpeculationCounters | None = None,
) -> dict[str, Any]:
    """Return all values of one run for reports.

    Args:
        duration: seconds from the first arrival to the last end.
        counters: the system's, of this run alone; None if not reported.
    """
    found: dict[str, Any] = dict(summarise(timings, duration, selection))
    failed = [one for one in timings if not one.ok]
    found["error_kinds"] = dict(Counter(one.error_kind or "unknown" for one in failed))
    found["error_examples"] = {one.error_kind or "unknown": one.error for one in reversed(failed)}
    found["speculation"] = speculation(timings, counters)
    domains: dict[str, list[Timing]] = defaultdict(list)
    for one in timings:
        domains[one.category].append(one)
    if len(domains) > 1:
        found["by_category"] = {name: _domain(members) for name, members in domains.items()}
    return found


def speculation(timings: Sequence[Timing], counters: SpeculationCounters | None = None) -> dict[str, Any]:
    """Return the speculation values; a key exists only if the system reports its data.

    ``target_calls_per_token`` counts the target steps of each request, independent of the batch. ``forwards_per_token``
    counts forwards of whole batches. The counts of single requests are preferred.
    """
    found: dict[str, Any] = {}
    reported = [one for one in timings if one.ok and one.stats]
    if reported:
        sums = {name: sum(int(one.stats[name]) for one in reported) for name in SUMMED}
        tokens = sum(one.reported_tokens or 0 for one in reported)
        if tokens:
            found["target_calls_per_token"] = sums["target_calls"] / tokens
        found |= _rates(sums["drafts"], sums["drafted"], sums["accepted"])
        if sums["accepted"] + sums["rejections"]:
            found["acceptance_rate"] = sums["accepted"] / (sums["accepted"] + sums["rejections"])
    elif counters is not None:
        found |= _rates(counters.drafts, counters.draft_tokens, counters.accepted_tokens)
    if counters is not None:
        if counters.drafts:
            found["acceptance_per_position"] = counters.per_position
        if counters.target_calls is not None and counters.generation_tokens:
            found["forwards_per_token"] = counters.target_calls / counters.generation_tokens
    return found


def by_load(loads: Sequence[LoadSample]) -> list[dict[str, float]]:
    """Return draft length by load: one point per interval between two reads of the server."""
    points: list[dict[str, float]] = []
    for before, after in pairwise(loads):
        step = after.counters - before.counters
        if step.length is not None and step.drafts > 0:
            running = (before.running + after.running) / 2
            points.append({"at": after.at, "running": running, "waiting": after.waiting, "length": step.length})
    return points


def against_first(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the ratios of a comparison whose baseline is the first system."""
    found: Sequence[Mapping[str, Any]] = result.get("ratios", ())
    return [row for row in found if row["baseline"] == found[0]["baseline"]]


def detailed(timings: Sequence[Timing]) -> dict[str, list[Any]]:
    """Return every request's values, as ``--save-detailed`` stores them; times in seconds."""
    found = [latency(one) for one in timings]
    return {
        "ids": [one.id for one in timings],
        "arrivals": [one.arrival for one in timings],
        "input_lens": [one.prompt_tokens for one in timings],
        "output_lens": [one.output_tokens for one in timings],
        "ttfts": [None if one is None else one.ttft for one in found],
        "itls": [[] if one is None else list(one.itl) for one in found],
        "generated_texts": [one.text for one in timings],
        "errors": [one.error or "" for one in timings],
    }


def _domain(timings: Sequence[Timing]) -> Mapping[str, Any]:
    """Return the values of one domain in a mixed run, without throughput, which is the mixture's."""
    whole = summarise(timings, 0.0, Selection(percentiles=()))
    kept = {name: value for name, value in whole.items() if name.startswith("mean_") or name in ("completed", "failed")}
    return kept | {"total_output_tokens": whole["total_output_tokens"], "speculation": speculation(timings)}


def _rates(drafts: int, drafted: int, accepted: int) -> dict[str, float]:
    """Return the rates of verified drafts; empty without drafts."""
    if not drafts:
        return {}
    rates = {"mean_acceptance_length": 1.0 + accepted / drafts, "speculation_length": drafted / drafts}
    return rates | ({"draft_acceptance_rate": accepted / drafted} if drafted else {})
