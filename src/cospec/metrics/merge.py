"""Metrics of several engines as the metrics of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MEANS = frozenset({"kv_cache_usage", "drafter_weights", "policy"})  # the other figures are sums


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
