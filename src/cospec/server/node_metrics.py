"""Drafter nodes for operators: the answer of ``/cluster``, and Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "cospec:drafter_node_"
GAUGES = {
    "load_seconds": "Predicted time of the node's calls without an answer.",
    "latency_seconds": "Mean time of the node's answers.",
    "waiting": "Messages that wait at the node.",
    "cost_per_hour": "What the node costs, as its command line says, divided by its drafters.",
}
COUNTERS = {
    "busy_seconds": "Time of the node's drafter.",
    "drafts": "Drafts that arrived.",
    "scores": "Scores of known tokens that arrived.",
    "steps": "Tokens of token steps that arrived.",
    "late": "Calls whose answer came too late, or never.",
    "lost": "Calls without an answer: the node left, was restarted or was quarantined.",
    "ignored": "Answers to no open call: repeated or late.",
    "damaged": "Messages with a wrong checksum, or that cause an exception.",
    "resyncs": "Times that the node asked for all tokens of a request.",
    "errors": "Answers with an error of the drafter.",
    "ended": "Connections that ended: the node left, died, fell silent or was excluded.",
}


def cluster_status(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The status of all drafter nodes, and their counts, those of lost nodes included.

    Args:
        engine: ``EngineMetrics`` as a dictionary.
    """
    nodes = [{**node, **_of_drafter(node["drafter"], engine)} for node in engine.get("nodes", ())]
    return {"nodes": nodes, "totals": list(engine.get("node_totals", ()))}


def node_families(nodes: Sequence[Mapping[str, Any]], totals: Sequence[Mapping[str, Any]], model: str) -> list[Metric]:
    """The figures of drafter nodes; connections with equal names are added up.

    Args:
        totals: see ``NodeHub.totals``; counters go on after the loss of a node.
    """
    if not nodes and not totals:
        return []
    labels, found = ["model_name", "node", "drafter"], list[Metric]()
    states = GaugeMetricFamily(PREFIX + "state", "Drafter nodes by state.", labels=[*labels, "state"])
    for key, count in Counter((node["node"], node["drafter"], node["state"]) for node in nodes).items():
        states.add_metric([model, *key], count)
    found.append(states)
    for kind, figures, rows in ((GaugeMetricFamily, GAUGES, nodes), (CounterMetricFamily, COUNTERS, totals)):
        for name, text in figures.items():
            family, sums = kind(PREFIX + name, text, labels=labels), Counter[tuple[str, str]]()
            for node in rows:
                sums[node["node"], node["drafter"]] += node[name]
            for names, value in sums.items():
                family.add_metric([model, *names], value)
            found.append(family)
    return found


def _of_drafter(name: str, engine: Mapping[str, Any]) -> dict[str, float | None]:
    """What verification says of the drafter: the weight in its pool, accepted / drafted tokens; None: not known."""
    drafted = engine["draft_tokens"].get(name, 0)
    rate = engine["accepted_tokens"].get(name, 0) / drafted if drafted else None
    return {"weight": engine["drafter_weights"].get(name), "draft_acceptance_rate": rate}
