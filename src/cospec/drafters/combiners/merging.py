"""Whole drafts of several drafters as one tree, each node with the drafters whose draft passes through it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cospec.drafters.combiners.growing import Growing
from cospec.drafters.combiners.job import Job, confidence_of


@dataclass(slots=True)
class Merged:
    """A tree whose scores are sums of weight times path confidence over the drafters that pass through a node.

    Attributes:
        weights: per node, the sum of the drafters' weights alone.
    """

    tree: Growing = field(default_factory=Growing)
    weights: list[float] = field(default_factory=list)


def merge(job: Job) -> Merged:
    """Every whole draft of the job, the heaviest drafter's first, so that shared nodes are its own."""
    merged = Merged()
    tree = merged.tree
    for member in sorted(job.drafts, key=lambda each: -job.weights[each]):
        draft, weight = job.drafts[member], job.weights[member]
        place, chance = {-1: -1}, {-1: 1.0}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            confidence = job.trust(member, confidence_of(draft, node))
            chance[node] = chance[parent] * confidence
            found = tree.find(place[parent], token)
            if found is None:
                found = tree.add(place[parent], token, member, 0.0, confidence)
                merged.weights.append(0.0)
            place[node] = found
            tree.scores[found] += weight * chance[node]
            tree.confidence[found] = max(tree.confidence[found], confidence)
            merged.weights[found] += weight
    return merged
