"""Whole drafts of several drafters as one tree, each node with the drafters whose draft passes through it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cospec.drafters.combiners.growing import Growing
from cospec.drafters.combiners.job import Job


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
    tree, weights = merged.tree, merged.weights
    for member in sorted(job.drafts, key=lambda each: -job.weights[each]):
        draft, weight = job.drafts[member], job.weights[member]
        place, chance = [-1], [1.0]  # of the root, then of the draft's nodes
        for token, parent, confidence in zip(draft.tokens, draft.parents, job.trusts(member), strict=True):
            node = tree.put(place[parent + 1], token, member, 0.0, confidence)
            if node == len(weights):
                weights.append(0.0)
            elif confidence > tree.confidence[node]:
                tree.confidence[node] = confidence
            place.append(node)
            chance.append(chance[parent + 1] * confidence)
            tree.scores[node] += weight * chance[-1]
            weights[node] += weight
    return merged
